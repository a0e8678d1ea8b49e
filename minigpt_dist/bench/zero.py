"""One training step of each ZeRO stage of ours, beside torch's FSDP2: the same model, batch and learning rate.

Owns the variants and the goals. Leaves the clock to `interleave`, model, data and FSDP2 to `step`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial

import torch
from torch import nn

from minigpt_dist.bench.comparison import Comparison
from minigpt_dist.bench.interleave import Seconds, interleaved, slowest
from minigpt_dist.bench.step import FSDP2, LR, SIZES, Step, fsdp2, optimizer_step, own_batch
from minigpt_dist.launch import run_world
from minigpt_dist.model import MiniGPT
from minigpt_dist.parallel.collectives import barrier, world
from minigpt_dist.parallel.zero import ZeroOptimizer


def stage_step(stage: int, model: nn.Module) -> Step:
    return partial(optimizer_step, model, ZeroOptimizer(model, *world(), lr=LR, stage=stage))


ZERO1, ZERO2, ZERO3 = (f"ours (ZeRO-{stage})" for stage in (1, 2, 3))
VARIANTS: dict[str, Callable[[nn.Module], Step]] = {
    ZERO1: partial(stage_step, 1),
    ZERO2: partial(stage_step, 2),
    ZERO3: partial(stage_step, 3),
    FSDP2: fsdp2,
}
GOALS = {ZERO2: {ZERO1: 1.1, FSDP2: 1.0}, ZERO3: {ZERO1: 1.4, FSDP2: 1.0}}
WITH_GOALS = "medium"  # a tiny model's step is the time of its messages, of which stages 2 and 3 send more


def step_body(size: str, rounds: int, steps: int) -> Seconds:
    """On each rank: the same initial weights for all variants, this rank's batch."""
    inputs, targets = own_batch(size)
    actions = {}
    for name, build in VARIANTS.items():
        torch.manual_seed(0)
        actions[name] = partial(build(MiniGPT(**asdict(SIZES[size]))), inputs, targets)
    return interleaved(actions, rounds, steps, warm_up=3, before=barrier)


def compare_stages(size: str, world_size: int, rounds: int, steps: int, deadline_s: float) -> list[Comparison]:
    """Steps of all variants in turns: `rounds` rounds, `steps` steps a turn. Stage 2 held against the others, and stage 3."""
    seconds = slowest(run_world(step_body, world_size, size, rounds, steps, deadline_s=deadline_s))
    what = f"{size}: P = {SIZES[size].numel():,}, {world_size} ranks, {rounds} rounds of {steps} steps"
    return [
        Comparison(f"Training step of {ours}, {what}", seconds, ours, goals if size == WITH_GOALS else {})
        for ours, goals in GOALS.items()
    ]
