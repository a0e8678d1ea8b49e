"""Correct peers pass every invariant at their own declared figures, resume byte-equal, and are reproduced bit for bit by one process."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from minigpt_dist.config import TrainConfig
from minigpt_dist.launch import run_world
from minigpt_dist.runner import Worker
from minigpt_dist.verify.checks import judge
from minigpt_dist.verify.composition import composed, default_config
from minigpt_dist.verify.peers import LAYERS, PEERS, build, pipelining, tensor_parallel, traits_of, unavailable
from minigpt_dist.verify.peers.replay import ORDERS, replay_body
from minigpt_dist.verify.peers.traits import Traits, optimizer_bytes
from minigpt_dist.verify.subject import Subject

pytestmark = pytest.mark.peers  # those that are also marked slow run with the package's own long tests

INVARIANTS = (
    "monotone_loss",
    "param_norms",
    "optimizer_bytes",
    "resume_bytes",
    "oracle",
    "tokens_once",
    "same_collectives",
    "live_bytes",
)
QUICK = [("torch-ddp", 3), ("torch-zero", 2), ("fsdp2", 2)]
EVERY = [(name, N) for name in PEERS for N in (1, 2, 3, 4)]
# Relative to the largest element: a few roundings of sums of a hundred terms.
REL = {"float32": 2e-6, "float64": 4e-15}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(case, id=f"{case[0]}-N{case[1]}", marks=[pytest.mark.slow] if case in QUICK else [])
        for case in EVERY
    ],
)
def peer(request: pytest.FixtureRequest) -> Iterator[tuple[Subject, int]]:
    name, world_size = request.param
    if unavailable(f"peer:{name}"):
        pytest.skip(unavailable(f"peer:{name}"))
    with Subject(f"peer:{name}", deadline_s=120) as subject:
        yield subject, world_size


def unlike(subject: Subject, world_size: int, order: str) -> list[tuple[int, int, str]]:
    """(step, rank, parameter) wherever a peer's bytes are not those of one process that adds in `order`."""
    config = default_config(world_size)
    right = run_world(replay_body, 1, config.to_dict(), order)[0]
    return [
        (r.step, r.rank, name)
        for r in composed(subject, config).whole.records
        for name, wanted in right[r.step].items()
        if r.params[name] != wanted
    ]


def test_a_correct_peer_passes_every_invariant(peer: tuple[Subject, int]) -> None:
    subject, world_size = peer
    verdicts = judge(subject, INVARIANTS, [world_size])
    assert [v.render(subject.spec) or v.not_judged for v in verdicts if not v.passed] == []


def test_one_process_reproduces_a_peer_bit_for_bit_at_every_step(peer: tuple[Subject, int]) -> None:
    subject, world_size = peer
    traits = traits_of(subject.spec)
    assert traits is not None
    assert unlike(subject, world_size, traits.order) == []


@pytest.mark.parametrize(
    "name, world_size",
    [("torch-ddp", 3), ("torch-ddp", 4), ("fsdp2", 3)],  # at 4 the rows divide: cuts by rows and by elements are one
)
def test_another_order_of_addition_gives_other_bits(name: str, world_size: int) -> None:
    others = [order for order in ORDERS if order != PEERS[name].traits.order]
    with Subject(f"peer:{name}", deadline_s=120) as subject:
        assert [order for order in others if unlike(subject, world_size, order) == []] == []


def ddp_body(config: dict[str, Any], folder: str, resume: bool, settle: bool) -> list[dict[str, str]]:
    from minigpt_dist.verify.peers.data_parallel import DataParallel  # in the rank: it warns of torch's own old calls

    worker = Worker(TrainConfig.from_dict(config), Path(folder), DataParallel(settle).pieces(), resume=resume)
    worker.run()
    return [record.params for record in worker.recorder.records]


@pytest.mark.parametrize(
    "settle", [pytest.param(True, id="after-one"), pytest.param(False, id="without", marks=pytest.mark.slow)]
)
def test_a_fresh_torch_ddp_resumes_byte_equal_only_after_a_dummy_pass(settle: bool, tmp_path: Path) -> None:
    plain = TrainConfig(world_size=3, steps=6, checkpoint_step=3).to_dict()
    whole = run_world(ddp_body, 3, plain, str(tmp_path), False, settle)[0]
    resumed = run_world(ddp_body, 3, plain, str(tmp_path), True, settle)[0]
    assert resumed[0] == whole[3]  # what is loaded is right either way
    assert (resumed[1:] == whole[4:]) is settle


@pytest.mark.parametrize(
    "schedule, micro_batches",
    [("gpipe", 3), ("gpipe", 4), ("1f1b", 4), pytest.param("1f1b", 3, marks=pytest.mark.slow)],
)
def test_torch_pipelining_over_two_stages_is_bit_equal_to_one_process_accumulating(
    schedule: str, micro_batches: int
) -> None:
    plain = TrainConfig(world_size=1, steps=6, micro_batches=micro_batches).to_dict()
    first, last = run_world(pipelining.pipeline_body, 2, plain, schedule)
    whole = run_world(pipelining.accumulation_body, 1, plain)[0]
    assert [{**a, **b} for a, b in zip(first["steps"], last["steps"], strict=True)] == whole["steps"]
    assert last["losses"] == whole["losses"]


def furthest(ranks: list[dict[str, torch.Tensor]], whole: dict[str, torch.Tensor]) -> float:
    """The largest distance of any rank's answer from one process's, relative to the largest element of that tensor."""
    assert all(mine.keys() == whole.keys() for mine in ranks)
    return max(float((mine[k] - whole[k]).abs().max() / whole[k].abs().max()) for mine in ranks for k in whole)


@pytest.mark.parametrize("dtype", list(REL))
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_torch_tensor_parallel_mlp_equals_the_unsharded_one(world_size: int, dtype: str) -> None:
    ranks = run_world(tensor_parallel.sharded_body, world_size, dtype, 24, 96)
    assert furthest(ranks, run_world(tensor_parallel.whole_body, 1, dtype, 24, 96)[0]) <= REL[dtype]


def megatron_body(side: str, dtype: str) -> dict[str, torch.Tensor]:
    """Imported in the rank only: it warns of what it misses, and is not needed elsewhere."""
    module = importlib.import_module("minigpt_dist.verify.peers.megatron")
    return dict(getattr(module, side)(dtype))


@pytest.mark.parametrize("dtype", list(REL))
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_megatrons_tensor_parallel_layers_and_loss_equal_one_process(world_size: int, dtype: str) -> None:
    if unavailable("peer:megatron"):
        pytest.skip(unavailable("peer:megatron"))
    ranks = run_world(megatron_body, world_size, "sharded_body", dtype)
    # Its cross-entropy computes in float32 whatever it is given.
    assert furthest(ranks, run_world(megatron_body, 1, "whole_body", dtype)[0]) <= REL["float32"]


@pytest.mark.slow
def test_declared_figures_are_those_of_each_rule() -> None:
    shapes = {"a": (4, 3), "b": (5,), "c": ()}  # 12, 5 and 1 elements
    assert optimizer_bytes(Traits(8, "all", counters=False), shapes, 2) == [144, 144]
    assert optimizer_bytes(Traits(8, "whole", counters=False), shapes, 2) == [96, 48]
    assert optimizer_bytes(Traits(8, "rows", counters=False), shapes, 2) == [80, 64]
    assert optimizer_bytes(Traits(12, "slices", counters=False), shapes, 2) == [120, 120]
    assert optimizer_bytes(Traits(12, "flat", alignment=2, counters=False), shapes, 4) == [72, 72, 72, 72]
    assert optimizer_bytes(Traits(8, "whole"), shapes, 2) == [96 + 4, 48 + 8]


@pytest.mark.slow
def test_an_unknown_rule_is_refused() -> None:
    with pytest.raises(ValueError, match="owns is 'half', but should be one of all"):
        optimizer_bytes(Traits(8, "half"), {}, 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nobody", *LAYERS])
def test_a_name_that_is_no_whole_run_is_refused_with_the_list(name: str) -> None:
    with pytest.raises(ValueError, match="torch-ddp, torch-zero, fsdp2"):
        build(name)


@pytest.mark.slow
def test_a_peer_that_is_not_installed_is_not_judged_and_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    verdict = judge(Subject("peer:deepspeed-1"), ["monotone_loss"], [2])[0]
    assert verdict.not_judged == "peer:deepspeed-1 needs deepspeed: pip install -e '.[peers]'"
