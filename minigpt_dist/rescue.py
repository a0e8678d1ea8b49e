"""Going back: what the guard's decision does to a run of this package.

Owns which batches are passed over afterwards. Leaves the decision to `guard.py`, and what the last good state is to the run: its newest
checkpoint, of which one is written before the first step, since a copy in memory would double what a rank holds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from minigpt_dist.guard import Guard

Restore = Callable[[nn.Module, Any], int]


class Rescue:
    """The guard of one rank's run.

    gradients: are they looked at too? Not under a loss scale, where an overflow is expected, and skips the step by itself.
    go_back: puts the last good state back, and returns its step. skipped: places of batches to pass over, which grows in place.
    """

    def __init__(self, guard: Guard, go_back: Restore, skipped: list[int], gradients: bool = True) -> None:
        self.guard, self.go_back, self.skipped, self.gradients = guard, go_back, skipped, gradients

    def ask(self, model: nn.Module, losses: list[float]) -> None:
        """Send off this rank's mean loss, and whether all gradients are finite."""
        looked_at = (p.grad for p in model.parameters() if p.grad is not None) if self.gradients else ()
        self.guard.ask(sum(losses) / len(losses), looked_at)

    def answer(self, step: int, model: nn.Module, optimizer: Any) -> int:
        """The step to go on from: this one, or the last good one, restored."""
        if self.guard.answer(step) is None:
            return step
        if self.guard.policy == "skip":
            self.skipped.append(place(step, self.skipped))
            self.skipped.sort()
        return self.go_back(model, optimizer)


def place(step: int, skipped: list[int]) -> int:
    """Which batch of the data, counted from 1, the `step`-th update reads: the `step`-th that is not in `skipped` (ascending)."""
    for passed in skipped:
        if passed <= step:
            step += 1
    return step
