"""One training step with gradients averaged in backward: our DistributedDataParallel beside torch's, the same optimizer behind both.

Owns the variants and the goal. Leaves the clock to `interleave`, model and data to `step`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial

import torch
from torch import nn
from torch.optim import Adam

from minigpt_dist.bench.comparison import Comparison
from minigpt_dist.bench.interleave import Seconds, interleaved, slowest
from minigpt_dist.bench.step import LR, SIZES, Step, optimizer_step, own_batch
from minigpt_dist.launch import run_world
from minigpt_dist.model import MiniGPT
from minigpt_dist.parallel.collectives import barrier
from minigpt_dist.parallel.data_parallel import DistributedDataParallel

OURS, TORCH = "ours (DDP, 25 MiB)", "torch DDP, gradient_as_bucket_view, 25 MiB"
GOALS = {TORCH: 1.05}


def _with(wrap: Callable[[nn.Module], nn.Module], model: nn.Module) -> Step:
    wrapped = wrap(model)
    return partial(optimizer_step, wrapped, Adam(wrapped.parameters(), lr=LR))


def variants() -> dict[str, Callable[[nn.Module], Step]]:
    torch_ddp = partial(nn.parallel.DistributedDataParallel, gradient_as_bucket_view=True)
    return {
        OURS: partial(_with, partial(DistributedDataParallel, bucket_mb=25.0)),
        "ours (DDP, 1 MiB)": partial(_with, partial(DistributedDataParallel, bucket_mb=1.0)),
        TORCH: partial(_with, partial(torch_ddp, bucket_cap_mb=25)),
        "torch DDP, gradient_as_bucket_view, 1 MiB": partial(_with, partial(torch_ddp, bucket_cap_mb=1)),
    }


def step_body(size: str, rounds: int, steps: int) -> Seconds:
    """On each rank: the same initial weights for all variants, this rank's batch."""
    inputs, targets = own_batch(size)
    actions = {}
    for name, build in variants().items():
        torch.manual_seed(0)
        actions[name] = partial(build(MiniGPT(**asdict(SIZES[size]))), inputs, targets)
    return interleaved(actions, rounds, steps, warm_up=3, before=barrier)


def compare_data_parallel(size: str, world_size: int, rounds: int, steps: int, deadline_s: float) -> Comparison:
    """Steps of all variants in turns: `rounds` rounds, `steps` steps a turn."""
    ranks = run_world(step_body, world_size, size, rounds, steps, deadline_s=deadline_s)
    title = (
        f"Data-parallel step, {size}: P = {SIZES[size].numel():,}, {world_size} ranks, {rounds} rounds of {steps} steps"
    )
    return Comparison(title, slowest(ranks), OURS, GOALS)
