"""The guard while it is quiet: ZeRO-1 steps with it beside the same steps without it.

Owns the variants and the goal. Leaves the clock to `interleave`, model and data to `step`.
"""

from __future__ import annotations

import time
from dataclasses import asdict

import torch
from torch import Tensor

from minigpt_dist.bench.comparison import Comparison
from minigpt_dist.bench.interleave import Seconds, interleaved, slowest
from minigpt_dist.bench.step import LR, SIZES, own_batch
from minigpt_dist.guard import Guard
from minigpt_dist.launch import run_world
from minigpt_dist.loss import next_token_loss
from minigpt_dist.model import MiniGPT
from minigpt_dist.parallel.collectives import barrier, world
from minigpt_dist.parallel.zero import ZeroOptimizer

WARM_UP = 3
GUARDED, UNGUARDED = "guarded, quiet", "without the guard"
CALLS, STEP = "the guard's two calls", "the whole step"
GOALS = {UNGUARDED: 1.01}
SHARE = {STEP: 0.01}


class Watched:
    """A step with a guard or without, as the loop takes it. calls, whole: CPU seconds of its guard's calls and of all of it, by step."""

    def __init__(self, size: str, guard: Guard | None, inputs: Tensor, targets: Tensor) -> None:
        torch.manual_seed(0)
        self.model = MiniGPT(**asdict(SIZES[size]))
        self.optimizer = ZeroOptimizer(self.model, *world(), lr=LR)
        self.guard, self.inputs, self.targets = guard, inputs, targets
        self.calls: list[float] = []
        self.whole: list[float] = []

    def __call__(self) -> None:
        began = time.process_time()  # of all threads: the exchange has one of its own
        self.optimizer.zero_grad()
        loss = next_token_loss(self.model(self.inputs), self.targets)
        loss.backward()
        told, asking = loss.item(), time.process_time()  # the loop logs the loss with and without a guard
        if self.guard is not None:
            self.guard.ask(told, (p.grad for p in self.model.parameters() if p.grad is not None))
        asked = time.process_time()
        self.optimizer.step()
        updated = time.process_time()
        if self.guard is not None and self.guard.answer(len(self.whole)) is not None:
            raise ValueError(f"the guard saw {self.guard.incidents[-1]}, but should be quiet")
        ended = time.process_time()
        self.calls.append(asked - asking + ended - updated)
        self.whole.append(ended - began)


def step_body(size: str, rounds: int, steps: int) -> tuple[Seconds, Seconds]:
    """On each rank: the same initial weights for both, this rank's batch. Seconds a step; CPU seconds of the guard and of its step."""
    inputs, targets = own_batch(size)
    guarded, plain = (Watched(size, guard, inputs, targets) for guard in (Guard(), None))
    actions = {GUARDED: guarded, UNGUARDED: plain}
    found = interleaved(actions, rounds, steps, warm_up=WARM_UP, before=barrier)
    return found, {CALLS: guarded.calls[WARM_UP:], STEP: guarded.whole[WARM_UP:]}


def compare_guard(size: str, world_size: int, rounds: int, steps: int, deadline_s: float) -> list[Comparison]:
    """Training steps with and without the guard, in turns; and the CPU seconds that rank 0 spends in the guard's calls."""
    ranks = run_world(step_body, world_size, size, rounds, steps, deadline_s=deadline_s)
    sizes = f"{size}: P = {SIZES[size].numel():,}, {world_size} ranks, {rounds} rounds of {steps} steps"
    return [
        Comparison(f"The guard, {sizes}", slowest([rank[0] for rank in ranks]), GUARDED, GOALS),
        Comparison(f"The guard's CPU seconds, {sizes}, rank 0", ranks[0][1], CALLS, SHARE),
    ]
