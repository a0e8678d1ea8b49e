"""Data, tensor and optimizer axis together, through the whole loop: one process' losses and weights at every step, in float64."""

from __future__ import annotations

import contextlib
import functools
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from minigpt_dist.batches import read_batch
from minigpt_dist.checkpoint import load_sharded
from minigpt_dist.config import ModelConfig, TrainConfig
from minigpt_dist.corpus import make_corpus
from minigpt_dist.launch import World, run_world
from minigpt_dist.loss import next_token_loss
from minigpt_dist.model import MiniGPT
from minigpt_dist.parallel.collectives import Group
from minigpt_dist.parallel.ddp import broadcast_parameters
from minigpt_dist.parallel.mesh import Mesh
from minigpt_dist.parallel.model_axis import ModelAxis
from minigpt_dist.parallel.tensor import replicated_parameters, tensor_parallel, token_loss, whole
from minigpt_dist.parallel.zero import ZeroOptimizer
from minigpt_dist.trace import digest
from minigpt_dist.worker import rank_body

STEPS, MAX_NORM, LR = 4, 0.3, 1e-2
LOSS, PARAMETER = 1e-13, 1e-8  # of float64, between reduction orders
MODEL = ModelConfig(vocab=18, embed_dim=16, num_heads=2, seq_len=8, tie_head=True)
CONFIG = TrainConfig(
    world_size=4, tp=2, micro_batches=2, steps=STEPS, dtype="float64", weight_decay=0.1, checkpoint_step=2, model=MODEL
)


@pytest.fixture(scope="module")
def ranks() -> Iterator[World]:
    with World(4, deadline_s=60) as live:
        yield live


LAYOUTS = [pytest.param(False, id="whole", marks=pytest.mark.slow), pytest.param(True, id="sequence")]


def built(seed: int) -> MiniGPT:
    torch.manual_seed(seed)
    return MiniGPT(vocab=18, embed_dim=16, num_heads=2, num_layers=2, seq_len=8, tie_head=True)


def micro_batch(step: int, replica: int, m: int) -> tuple[Tensor, Tensor]:
    return read_batch(make_corpus(0, CONFIG.total_tokens, 18), CONFIG, step, replica, m)


def one_process_body(max_norm: float) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Losses and gradient norms by step, and the last weights, of the plain model under torch's AdamW."""
    model, losses, norms = built(0).double(), [], []
    adamw = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1)
    for step in range(STEPS):
        adamw.zero_grad()
        parts = [next_token_loss(model(x), y) for x, y in (micro_batch(step, r, m) for r in range(2) for m in range(2))]
        loss = torch.stack(parts).mean()
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), max_norm)))
        losses.append(loss.item())
        adamw.step()
    return losses, norms, {name: p.detach() for name, p in model.named_parameters()}


@functools.cache
def one_process(max_norm: float) -> tuple[list[float], list[float], dict[str, Tensor]]:
    return run_world(one_process_body, 1, max_norm)[0]  # type: ignore[no-any-return]  # what the body returned


def clipped_body(sequence: bool, wrong: str = "") -> tuple[list[float], dict[str, Tensor]]:
    """This replica's losses and the last weights, with a norm that is always too large."""
    mesh = Mesh(CONFIG.layout)
    data, tensor = mesh.group("dp"), mesh.group("tp")
    model = tensor_parallel(built(dist.get_rank()), tensor, sequence_parallel=sequence).double()
    broadcast_parameters(model, group=data)
    elsewhere = replicated_parameters(model) if mesh.place.tp and wrong != "counted by all" else ()
    axis = None if wrong == "each its own norm" else ModelAxis(tensor, elsewhere)
    norm = None if wrong == "the first alone clips" and mesh.place.tp else MAX_NORM
    optimizer = ZeroOptimizer(model, 2, mesh.place.dp, LR, weight_decay=0.1, max_norm=norm, group=data, model_axis=axis)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        parts = [token_loss(model, model(x), y) for x, y in (micro_batch(step, mesh.place.dp, m) for m in range(2))]
        (loss := torch.stack(parts).mean()).backward()
        with unheard(data) if wrong == "the first alone clips" else contextlib.nullcontext():
            optimizer.step()
        losses.append(loss.item())
    return losses, {name: t.clone() for name, t in whole(model)}


def unheard(data: Group) -> Any:
    """Norms are not exchanged over the replica, as not all of its ranks take part."""
    return mock.patch.object(ModelAxis, "sum", lambda self, value: value)


def agrees(answers: list[tuple[list[float], dict[str, Tensor]]], max_norm: float = MAX_NORM) -> bool:
    """Is each rank's last state the one process', and the mean over replicas of each step's loss?"""
    losses, _, weights = one_process(max_norm)
    means = [(a + b) / 2 for a, b in zip(answers[0][0], answers[2][0], strict=True)]
    near = all(bool((held[n] - p).abs().max() <= PARAMETER) for _, held in answers for n, p in weights.items())
    return near and all(abs(a - b) <= LOSS for a, b in zip(means, losses, strict=True))


@pytest.mark.parametrize("sequence", LAYOUTS)
def test_clipping_counts_each_weight_once_over_both_axes(ranks: World, sequence: bool) -> None:
    assert min(one_process(MAX_NORM)[1]) > MAX_NORM
    assert agrees(ranks.run(clipped_body, sequence))


@pytest.mark.parametrize(
    "wrong",
    [
        "counted by all",
        *(pytest.param(w, marks=pytest.mark.slow) for w in ("each its own norm", "the first alone clips")),
    ],
)
def test_a_wrong_norm_is_told_from_the_one_process_run(ranks: World, wrong: str) -> None:
    assert not agrees(ranks.run(clipped_body, False, wrong))


def records_of(ranks: World, config: TrainConfig, folder: str, source: str | None = None) -> list[list[dict[str, Any]]]:
    results = ranks.run(rank_body, config.to_dict(), folder, source is not None, ["digests", "bytes"], "cpu", source)
    return [result["records"] for result in results]


@pytest.fixture(scope="module")
def run(ranks: World) -> Iterator[Callable[..., tuple[list[list[dict[str, Any]]], Path]]]:
    """Records of a run of CONFIG with changes, by rank, and its folder; each is made once."""
    with tempfile.TemporaryDirectory() as area:

        @functools.cache
        def made(**changes: Any) -> tuple[list[list[dict[str, Any]]], Path]:
            folder = Path(area) / "".join(f"{k}{v}" for k, v in changes.items())
            folder.mkdir()
            return records_of(ranks, replace(CONFIG, **changes), str(folder)), folder

        yield made


@pytest.mark.parametrize("sequence", LAYOUTS)
def test_every_step_of_the_loop_has_one_process_loss_and_gradient_norm(run: Any, sequence: bool) -> None:
    records, _ = run(sequence_parallel=sequence)
    losses, norms, weights = one_process(1e9)
    for step in range(STEPS):
        now = [rank[step + 1] for rank in records]
        assert sum(r["loss"] for r in now) / 4 == pytest.approx(losses[step], abs=LOSS)
        assert sum(r["grad_sq"] for r in now) ** 0.5 == pytest.approx(norms[step], rel=1e-11)
    total = sum(float(p.square().sum()) for p in weights.values()) ** 0.5
    assert records[0][-1]["param_norm"] == pytest.approx(total, rel=PARAMETER)


@pytest.mark.parametrize("sequence", LAYOUTS)
def test_all_ranks_hold_the_same_bytes_at_every_step(run: Any, sequence: bool) -> None:
    records, _ = run(sequence_parallel=sequence)
    assert all(rank[s]["params"] == records[0][s]["params"] for rank in records for s in range(STEPS + 1))


def test_a_rank_holds_its_share_of_optimizer_state(run: Any) -> None:
    records, _ = run(sequence_parallel=True)
    share = -(-MODEL.numel(2) // 2)
    assert {rank[-1]["bytes"]["optimizer"] for rank in records} == {3 * 8 * share}
    assert MODEL.numel(2) == sum(p.numel() for p in tensor_cut().parameters())


def tensor_cut() -> MiniGPT:
    """What the first of two tensor-parallel ranks holds, cut without the other."""
    with (
        mock.patch("minigpt_dist.parallel.tensor.axis.world", return_value=(2, 0)),
        mock.patch("minigpt_dist.parallel.tensor.gpt.broadcast_parameters"),
    ):
        return tensor_parallel(built(0))


def test_a_run_resumes_with_its_bytes_and_trains_on_to_those_of_the_unbroken_one(ranks: World, run: Any) -> None:
    records, folder = run(sequence_parallel=True)
    with tempfile.TemporaryDirectory() as again:
        resumed = records_of(ranks, replace(CONFIG, sequence_parallel=True), again, str(folder))
    assert [r["step"] for r in resumed[0]] == [2, 3, 4]
    assert all(
        new["params"] == old["params"]
        for a, b in zip(resumed, records, strict=True)
        for new, old in zip(a, b[2:], strict=True)
    )
    assert all(
        new["optimizer"] == old["optimizer"]
        for a, b in zip(resumed, records, strict=True)
        for new, old in zip(a, b[2:], strict=True)
    )


def test_the_checkpoint_holds_each_ranks_part_under_the_models_names(run: Any) -> None:
    _, folder = run(sequence_parallel=True)
    states = load_sharded(folder, 4)
    assert list(states[0]["model"]) == list(built(0).state_dict())
    assert states[0]["model"]["head.weight"].shape == (9, 16)
    assert [digest(s["model"]["head.weight"]) for s in states[:2]] == [
        digest(s["model"]["head.weight"]) for s in states[2:]
    ]


@pytest.mark.slow  # two more runs; the gradients alone are compared in the quick tests of recomputation
def test_recomputation_changes_no_bit_of_a_run_with_dropout(run: Any) -> None:
    model = replace(MODEL, dropout=0.2)
    plain, _ = run(model=model, sequence_parallel=True)
    again, _ = run(model=model, sequence_parallel=True, recompute=True)
    assert [[r["params"] for r in rank] for rank in plain] == [[r["params"] for r in rank] for rank in again]


@pytest.mark.slow  # a run each
@pytest.mark.parametrize(
    "changes", [{"recompute": True}, {"reduction": "exact"}, {"max_norm": 0.3}, {"dtype": "float16"}], ids=str
)
@pytest.mark.parametrize("stage", [2, 3])
def test_zero_stages_2_and_3_along_the_data_axis_have_the_bits_of_stage_1(
    run: Any, stage: int, changes: dict[str, Any]
) -> None:
    first, _ = run(sequence_parallel=True, **{**changes, "recompute": False})
    other, _ = run(sequence_parallel=True, zero_stage=stage, **changes)
    assert [[r["params"] for r in rank] for rank in first] == [[r["params"] for r in rank] for rank in other]
    assert [[r["optimizer"] for r in rank] for rank in first] == [[r["optimizer"] for r in rank] for rank in other]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tp": 3}, "world_size is 4, but should be a multiple of tp \\(3\\)"),
        ({"tp": 4}, "num_heads is 2, but should be a multiple of tp \\(4\\)"),
        ({"tp": 0}, "tp is 0, but should be a whole number of at least 1"),
        (
            {"sequence_parallel": True, "model": replace(MODEL, seq_len=9)},
            "seq_len is 9, but should be a multiple of tp",
        ),
    ],
)
def test_a_layout_that_the_model_does_not_fit_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        replace(CONFIG, **changes)
