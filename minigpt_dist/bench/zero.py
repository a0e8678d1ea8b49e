"""One training step of each ZeRO stage of ours, beside torch's FSDP2: the same model, batch and learning rate.

Owns the variants and the goals. Leaves the clock to `interleave`, model, data and FSDP2 to `step`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial

import torch
from torch import nn

from minigpt_dist.bench.interleave import Seconds, interleaved
from minigpt_dist.bench.step import FSDP2, LR, SIZES, Step, fsdp2, optimizer_step, own_batch
from minigpt_dist.model import MiniGPT
from minigpt_dist.parallel.collectives import barrier, world
from minigpt_dist.parallel.zero import ZeroOptimizer


def stage_step(stage: int, model: nn.Module) -> Step:
    return partial(optimizer_step, model, ZeroOptimizer(model, *world(), lr=LR, stage=stage))


VARIANTS: dict[str, Callable[[nn.Module], Step]] = {
    **{f"ours (ZeRO-{stage})": partial(stage_step, stage) for stage in (1, 2, 3)},
    FSDP2: fsdp2,
}


def step_body(size: str, rounds: int, steps: int) -> Seconds:
    """On each rank: the same initial weights for all variants, this rank's batch."""
    inputs, targets = own_batch(size)
    actions = {}
    for name, build in VARIANTS.items():
        torch.manual_seed(0)
        actions[name] = partial(build(MiniGPT(**asdict(SIZES[size]))), inputs, targets)
    return interleaved(actions, rounds, steps, warm_up=3, before=barrier)
