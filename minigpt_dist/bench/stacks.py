"""Whole training stacks from the same weights and batches: ours in each stage of ZeRO, torch's, and one process that does it all.

Owns the runs and what is found in them: losses, how far parameters are from the one process's, whose bits they have, bytes, time.
Leaves the order in which each stack adds to `verify/peers/replay.py`, what is right of it to the command that shows it.
"""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from minigpt_dist.bench.interleave import Seconds, interleaved, slowest
from minigpt_dist.bench.step import SIZES, Step, ddp_adam, ddp_zero, fsdp2, own_batch
from minigpt_dist.bench.zero import stage_step
from minigpt_dist.config import TrainConfig
from minigpt_dist.launch import run_world
from minigpt_dist.model import MiniGPT
from minigpt_dist.parallel.collectives import barrier
from minigpt_dist.runner import Worker
from minigpt_dist.verify.peers.catalogue import PEERS, build
from minigpt_dist.verify.peers.replay import FIRST_BUCKET, Replayed, replay
from minigpt_dist.worker import pieces_of

KINDS = ("params", "grads", "optimizer")
ZERO1, ZERO2, ZERO3 = (f"ours, ZeRO-{stage}" for stage in (1, 2, 3))
ONE, DDP, ZRO, FSDP2 = "one process", "DDP + AdamW", "DDP + ZeroRedundancyOptimizer", "FSDP2 + AdamW"
STAGES = {ZERO1: 1, ZERO2: 2, ZERO3: 3}
PEER_OF = {DDP: "torch-ddp", ZRO: "torch-zero", FSDP2: "fsdp2"}
# A run has no weight decay, without which AdamW is Adam.
TIMED: dict[str, Callable[[nn.Module], Step]] = {
    **{name: partial(stage_step, stage) for name, stage in STAGES.items()},
    DDP: ddp_adam,
    ZRO: ddp_zero,
    FSDP2: fsdp2,
}


def order_of(stack: str) -> str:
    """The name of the order in which a stack adds gradients: for ours and one process rank order."""
    return PEERS[PEER_OF[stack]].traits.order if stack in PEER_OF else "ranks"


@dataclass(frozen=True)
class Row:
    """One stack. losses: mean over ranks, by step. bytes: by kind, after the last step, of the rank that holds most.

    from_one: the largest distance of a loss, and of a parameter at the end, from the one process's, in float32 and in float64.
    same_bits: the orders of addition that give all ranks' parameters at every step, bit for bit, in float32.
    """

    stack: str
    losses: list[float]
    bytes: dict[str, int]
    loss_apart: dict[str, float]
    param_apart: dict[str, float]
    same_bits: tuple[str, ...]


def configuration(size: str, world_size: int, steps: int, dtype: str) -> TrainConfig:
    """What all stacks train; `size` as in `bench.step`."""
    return TrainConfig(world_size=world_size, steps=steps, checkpoint_step=0, dtype=dtype, model=SIZES[size])


def orders(config: TrainConfig) -> list[str]:
    """The orders that can be replayed: of torch's data parallelism only a run whose gradients are one bucket."""
    one_bucket = config.model.numel() * 4 <= FIRST_BUCKET
    return ["ranks", *(["buckets"] if one_bucket else []), "units"]


def stack_body(config: dict[str, Any], folder: str, stack: str) -> dict[str, Any]:
    """On each rank: losses and digests by step, bytes, and the parameters at the end, whole."""
    settings = TrainConfig.from_dict(config)
    if stack in STAGES:
        settings = replace(settings, zero_stage=STAGES[stack])
        pieces = pieces_of(settings, Path(folder))
    else:
        pieces = build(PEER_OF[stack]).EXTRAS["pieces"]()
    worker = Worker(settings, Path(folder), pieces, watch=frozenset({"digests", "bytes"}))
    worker.run()
    records = worker.recorder.records
    with worker.recorder.gathered():
        final = {name: p.detach().clone() for name, p in worker.recorder.parameters().items()}
    return {
        "losses": [record.loss for record in records[1:]],
        "digests": [record.params for record in records],
        "bytes": records[-1].bytes,
        "final": final,
    }


def replay_body(config: dict[str, Any], order: str) -> dict[str, Any]:
    """On one rank: the same training by one process that adds in `order`."""
    return asdict(replay(TrainConfig.from_dict(config), order))


def compare_stacks(size: str, world_size: int, steps: int, deadline_s: float, stacks: tuple[str, ...]) -> list[Row]:
    """A row for one process and for each of `stacks`, from runs in float32 and float64."""
    single, double = (configuration(size, world_size, steps, dtype) for dtype in ("float32", "float64"))
    replays = {order: _replayed(single, order, deadline_s) for order in orders(single)}
    ones = {"float32": replays["ranks"], "float64": _replayed(double, "ranks", deadline_s)}
    mean = [math.fsum(losses) / world_size for losses in ones["float32"].losses]
    nothing = dict.fromkeys(ones, 0.0)
    rows = [Row(ONE, mean, {}, nothing, nothing, ("ranks",))]
    for stack in stacks:
        ran = {config.dtype: _ranks(config, stack, deadline_s) for config in (single, double)}
        found = ran["float32"]
        rows.append(
            Row(
                stack,
                [math.fsum(losses) / world_size for losses in zip(*(rank["losses"] for rank in found), strict=True)],
                {kind: max(rank["bytes"][kind] for rank in found) for kind in KINDS},
                {dtype: _losses_apart(ran[dtype], one) for dtype, one in ones.items()},
                {dtype: _params_apart(ran[dtype], one) for dtype, one in ones.items()},
                tuple(o for o, it in replays.items() if all(rank["digests"] == it.digests for rank in found)),
            )
        )
    return rows


def _replayed(config: TrainConfig, order: str, deadline_s: float) -> Replayed:
    return Replayed(**run_world(replay_body, 1, config.to_dict(), order, deadline_s=deadline_s)[0])


def _ranks(config: TrainConfig, stack: str, deadline_s: float) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="minigpt-dist-") as folder:
        return run_world(stack_body, config.world_size, config.to_dict(), folder, stack, deadline_s=deadline_s)


def _losses_apart(ranks: list[dict[str, Any]], one: Replayed) -> float:
    by_step = zip(zip(*(rank["losses"] for rank in ranks), strict=True), one.losses, strict=True)
    return max(float(abs(a - b)) for mine, its in by_step for a, b in zip(mine, its, strict=True))


def _params_apart(ranks: list[dict[str, Any]], one: Replayed) -> float:
    def apart(final: dict[str, Tensor]) -> float:
        return max((final[name] - value).abs().max().item() for name, value in one.final.items())

    return max(apart(rank["final"]) for rank in ranks)


def time_body(size: str, rounds: int, steps: int, stacks: list[str]) -> Seconds:
    """On each rank: the same initial weights for all stacks, this rank's batch."""
    inputs, targets = own_batch(size)
    actions = {}
    for name in stacks:
        torch.manual_seed(0)
        actions[name] = partial(TIMED[name](MiniGPT(**asdict(SIZES[size]))), inputs, targets)
    return interleaved(actions, rounds, steps, warm_up=3, before=barrier)


def time_stacks(
    size: str, world_size: int, rounds: int, steps: int, deadline_s: float, stacks: tuple[str, ...]
) -> dict[str, tuple[float, float]]:
    """Stack -> seconds a step, median over rounds, and its ratio to DDP's of the same round, median too. In turns."""
    seconds = slowest(run_world(time_body, world_size, size, rounds, steps, list(stacks), deadline_s=deadline_s))
    ratios = {name: [a / b for a, b in zip(times, seconds[DDP], strict=True)] for name, times in seconds.items()}
    return {name: (statistics.median(times), statistics.median(ratios[name])) for name, times in seconds.items()}
