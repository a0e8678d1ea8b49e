"""What the planner predicts of this package's own runs is what they hold and send, byte for byte."""

from __future__ import annotations

import functools
import itertools
import tempfile
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from peak_memory import Peak, kept_for_backward
from torch import nn

from minigpt_dist.config import ModelConfig, TrainConfig
from minigpt_dist.launch import run_world
from minigpt_dist.layout import Layout
from minigpt_dist.loss import next_token_loss
from minigpt_dist.memory import baseline, census
from minigpt_dist.model import MiniGPT
from minigpt_dist.parallel.collectives import ONE_ROUND_BYTES, world
from minigpt_dist.parallel.p2p import Peers
from minigpt_dist.parallel.pipeline import SCHEDULES, Pipeline, layers_of
from minigpt_dist.parallel.zero import ZeroOptimizer
from minigpt_dist.planner import ModelShape, Techniques, communication, memory
from minigpt_dist.planner.communication import communication_of
from minigpt_dist.planner.memory import memory_of
from minigpt_dist.planner.stages import shares
from minigpt_dist.planner.techniques import OWN
from minigpt_dist.worker import rank_body

KINDS = ("params", "grads", "optimizer", "activations", "buffers")
BATCH = 2
MODELS = {
    "tiny": ModelConfig(),
    "uneven": ModelConfig(vocab=33, embed_dim=24, num_heads=3, num_layers=3, seq_len=7, mlp_ratio=2, tie_head=True),
    "large": ModelConfig(
        vocab=600, embed_dim=192, num_heads=4, num_layers=1, seq_len=16
    ),  # gathered in more than one round
}
QUICK = [(2, "uneven", "float32")]
SLOW = [
    case
    for case in itertools.product((1, 2, 4), MODELS, ("float32", "float64", "bfloat16"))
    if case not in QUICK and case[1:] != ("large", "bfloat16")  # fits one round
]
CASES = [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]


def transient_body(sizes: dict[str, Any], dtype: str) -> list[int]:
    """[bytes kept for backward, most bytes alive at once in a step of the optimizer]."""
    model = MiniGPT(**sizes).to(getattr(torch, dtype))
    optimizer, peaks = ZeroOptimizer(model, *world()), []
    x = torch.zeros((BATCH, model.seq_len), dtype=torch.int64)
    for _ in range(4):  # the least: a communication thread may let go of a message late
        optimizer.zero_grad()
        next_token_loss(model(x), x).backward()
        with Peak() as peak:
            optimizer.step()
        peaks.append(peak.most)
    kept = kept_for_backward(lambda: next_token_loss(model(x), x), [*model.parameters(), x])
    return [kept, min(peaks)]


def measure_body(sizes: dict[str, Any], dtype: str, folder: str) -> list[int]:
    """The bytes of every kind, and those that this rank has sent in one step."""
    config = TrainConfig(world()[0], 1, batch=BATCH, checkpoint_step=0, dtype=dtype, model=ModelConfig(**sizes))
    record = rank_body(config.to_dict(), folder, False, ["bytes", "collectives"], "cpu")["records"][-1]
    payload = sum(call["bytes"] for call in record["collectives"])  # own slice included
    held = [record["bytes"][kind] for kind in KINDS[:3]]
    return [*held, *transient_body(sizes, dtype), payload * (config.world_size - 1) // config.world_size]


@functools.cache
def measured(N: int, name: str, dtype: str) -> list[list[int]]:
    """What each of N ranks measured."""
    with tempfile.TemporaryDirectory() as folder:
        return run_world(measure_body, N, asdict(MODELS[name]), dtype, folder)


@pytest.mark.parametrize("N, name, dtype", CASES)
def test_every_kind_of_memory_is_as_predicted(N: int, name: str, dtype: str) -> None:
    predicted = memory(ModelShape.of("minigpt", MODELS[name]), Layout(dp=N, precision=dtype), BATCH)
    for rank in measured(N, name, dtype):
        assert dict(zip(KINDS, rank, strict=False)) == {kind: getattr(predicted, kind) for kind in KINDS}


@pytest.mark.parametrize("N, name, dtype", CASES)
def test_bytes_on_the_data_axis_are_those_of_the_trace(N: int, name: str, dtype: str) -> None:
    predicted = communication(ModelShape.of("minigpt", MODELS[name]), Layout(dp=N, precision=dtype), BATCH)
    assert [rank[-1] for rank in measured(N, name, dtype)] == [predicted.dp] * N
    assert (predicted.tp, predicted.pp) == (0, 0)


def fullest_body(sizes: dict[str, Any], layout: dict[str, Any]) -> int:
    """The most bytes alive at once in a step, state included; the least of some steps, as above."""
    plan = Layout(**layout)
    known = baseline()
    model = MiniGPT(**sizes).to(getattr(torch, plan.precision))
    optimizer, peaks = ZeroOptimizer(model, *world(), stage=plan.zero_stage), []
    x = torch.zeros((BATCH, model.seq_len), dtype=torch.int64)
    optimizer.zero_grad()
    held = sum(census(model, known).values()) - x.nbytes
    for _ in range(4):
        with Peak() as peak:
            for m in range(plan.micro_batches):
                with nullcontext() if m == plan.micro_batches - 1 else optimizer.no_sync():
                    next_token_loss(model(x), x).backward()
            optimizer.step()
        optimizer.zero_grad()
        peaks.append(peak.most)
    return held + min(peaks)


DEEP = ModelConfig(vocab=128, embed_dim=64, num_heads=4, num_layers=6, seq_len=64)


@pytest.mark.slow
@pytest.mark.parametrize(
    "N, stage, micro_batches, dtype",
    [*itertools.product((1, 2, 4), (1, 2, 3), (1, 3), ("float32", "bfloat16"))],
)
def test_the_fullest_moment_of_a_step_is_as_predicted_within_five_percent(
    N: int, stage: int, micro_batches: int, dtype: str
) -> None:
    layout = Layout(dp=N, zero_stage=stage, precision=dtype, micro_batches=micro_batches)
    predicted = memory(ModelShape.of("minigpt", DEEP), layout, BATCH).total
    assert max(run_world(fullest_body, N, asdict(DEEP), asdict(layout))) == pytest.approx(predicted, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("N, stage, micro_batches", [*itertools.product((2, 4), (2, 3), (1, 3))])
def test_bytes_of_later_stages_are_those_of_the_trace(N: int, stage: int, micro_batches: int, tmp_path: Path) -> None:
    config = TrainConfig(N, 1, batch=BATCH, checkpoint_step=0, zero_stage=stage, micro_batches=micro_batches)
    ranks = run_world(rank_body, N, config.to_dict(), str(tmp_path), False, ["collectives"], "cpu")
    payload = sum(call["bytes"] for rank in ranks for call in rank["records"][-1]["collectives"])
    predicted = communication(ModelShape.of("minigpt", config.model), config.layout, BATCH).dp
    assert payload * (N - 1) // N == N * predicted  # the mean over ranks: a unit's owner sends all of it


@pytest.mark.slow
@pytest.mark.parametrize("tp, recompute", [(2, False), (2, True), (4, False)])
def test_states_and_bytes_on_the_tensor_axis_are_those_of_the_trace(tp: int, recompute: bool, tmp_path: Path) -> None:
    config = TrainConfig(tp, 1, batch=BATCH, checkpoint_step=0, tp=tp, recompute=recompute)
    ranks = run_world(rank_body, tp, config.to_dict(), str(tmp_path), False, ["bytes", "collectives"], "cpu")
    records, shape = [rank["records"][-1] for rank in ranks], ModelShape.of("minigpt", config.model)
    predicted = memory(shape, config.layout, BATCH).to_dict()
    assert [{kind: r["bytes"][kind] for kind in KINDS[:3]} for r in records] == [
        {k: predicted[k] for k in KINDS[:3]}
    ] * tp
    payloads = [
        sum(call["bytes"] for call in r["collectives"]) for r in records
    ]  # a ring sends each 2 (t - 1) / t times
    assert [2 * (tp - 1) * payload // tp for payload in payloads] == [
        communication(shape, config.layout, BATCH).tp
    ] * tp


@pytest.mark.slow
@pytest.mark.parametrize("dp, tp, pp, schedule", [(2, 2, 2, "1f1b"), (1, 1, 4, "gpipe"), (2, 1, 2, "interleaved")])
def test_states_of_every_pipeline_rank_are_as_predicted(
    dp: int, tp: int, pp: int, schedule: str, tmp_path: Path
) -> None:
    axes = {"tp": tp, "pp": pp, "schedule": schedule, "micro_batches": 2}
    config = TrainConfig(dp * tp * pp, 1, batch=BATCH, checkpoint_step=0, model=ModelConfig(tie_head=True), **axes)
    ranks = run_world(rank_body, config.world_size, config.to_dict(), str(tmp_path), False, ["bytes"], "cpu")
    shape = ModelShape.of("minigpt", config.model)
    wanted = [memory_of(share, shape, config.layout, BATCH, OWN).to_dict() for share in shares(shape, config.layout)]
    for rank, result in enumerate(ranks):
        held = result["records"][-1]["bytes"]
        assert {kind: held[kind] for kind in KINDS[:3]} == {kind: wanted[rank // (dp * tp)][kind] for kind in KINDS[:3]}


def test_one_round_gathers_end_where_the_collective_ends_them() -> None:
    assert Techniques().one_round_bytes == ONE_ROUND_BYTES


def pipeline_body(sizes: dict[str, Any], layout: dict[str, Any]) -> int:
    """Bytes that this rank has sent in one step of a pipeline that is cut as the planner cuts it."""
    shape, plan = ModelShape.of("minigpt", ModelConfig(**sizes)), Layout(**layout)
    schedule = SCHEDULES[plan.schedule](plan.pp, plan.micro_batches, *([2] if plan.schedule == "interleaved" else []))
    first, *blocks, last = layers_of(MiniGPT(**sizes))
    counts = [0] * plan.stages
    for share in shares(shape, plan):
        counts[share.rank :: plan.pp] = share.stages
    stages = {}
    for s, count in enumerate(counts):
        ends = ([first] if s == 0 else []), ([last] if s == plan.stages - 1 else [])
        stages[s] = nn.Sequential(*ends[0], *[blocks.pop(0) for _ in range(count)], *ends[1])
    peers, x = Peers(), torch.zeros((BATCH, sizes["seq_len"]), dtype=torch.int64)
    own = {s: stage for s, stage in stages.items() if s % plan.pp == peers.rank}
    between = (BATCH, sizes["seq_len"], sizes["embed_dim"])
    Pipeline(own, schedule, next_token_loss, between, torch.float32, peers).step(*[[x] * plan.micro_batches] * 2)
    return peers.bytes_sent


@pytest.mark.parametrize(
    "pp, schedule",
    [
        (2, "1f1b"),
        pytest.param(3, "gpipe", marks=pytest.mark.slow),
        pytest.param(2, "interleaved", marks=pytest.mark.slow),
    ],
)
def test_bytes_on_the_pipeline_axis_are_those_that_peers_sent(pp: int, schedule: str) -> None:
    sizes = ModelConfig(num_layers=5, vocab=40)
    layout = Layout(pp=pp, micro_batches=4, schedule=schedule, zero_stage=0)
    shape = ModelShape.of("minigpt", sizes)
    predicted = [communication_of(share, shape, layout, BATCH, OWN).pp for share in shares(shape, layout)]
    assert run_world(pipeline_body, pp, asdict(sizes), asdict(layout)) == predicted


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_counted_exactly(name: str) -> None:
    assert (
        ModelShape.of("minigpt", MODELS[name]).numel
        == MODELS[name].numel()
        == sum(p.numel() for p in MiniGPT(**asdict(MODELS[name])).parameters())
    )
