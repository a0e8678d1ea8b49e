"""Going back: what the guard's decision does to a run of this package.

Owns which batches are passed over afterwards. Leaves the decision to `guard.py`, and what the last good state is to the run: its newest
checkpoint, of which one is written before the first step, since a copy in memory would double what a rank holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from minigpt_dist.guard import Guard

Restore = Callable[[nn.Module, Any], int]


class Rescue:
    """The guard of one rank's run.

    go_back: puts the last good state back, and returns its step. skipped: places of batches to pass over, which grows in place.
    gradients: what this rank holds of them before the update; by default what the model's parameters have.
    """

    def __init__(self, guard: Guard, go_back: Restore, skipped: list[int]) -> None:
        self.guard, self.go_back, self.skipped = guard, go_back, skipped
        self.gradients: Callable[[nn.Module], Iterable[Tensor]] = whole_gradients

    def ask(self, model: nn.Module, losses: list[float]) -> None:
        """Send off this rank's mean loss, and whether all gradients are finite."""
        self.guard.ask(sum(losses) / len(losses), self.gradients(model))

    def answer(self, step: int, model: nn.Module, optimizer: Any) -> int:
        """The step to go on from: this one, or the last good one, restored."""
        if self.guard.answer(step) is None:
            return step
        if self.guard.policy == "skip":
            self.skipped.append(place(step, self.skipped))
            self.skipped.sort()
        return self.go_back(model, optimizer)


def whole_gradients(model: nn.Module) -> Iterable[Tensor]:
    """The gradients that parameters have."""
    return (p.grad for p in model.parameters() if p.grad is not None)


def place(step: int, skipped: list[int]) -> int:
    """Which batch of the data, counted from 1, the `step`-th update reads: the `step`-th that is not in `skipped` (ascending)."""
    for passed in skipped:
        if passed <= step:
            step += 1
    return step
