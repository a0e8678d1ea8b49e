"""The training loop: forward, backward, log, and three calls in order - broadcast, step, save.

Owns the order of things. Leaves how ranks talk, where files go and what is recorded to the callables it is given:
it knows of no rank, no collective and no folder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

from torch import Tensor, nn


class Optimizer(Protocol):
    """What the loop needs of an optimizer."""

    def zero_grad(self) -> None: ...

    def step(self) -> object: ...


AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)


class Observer(Protocol):
    """Told what happened, in order; changes nothing."""

    def started(self, step: int) -> None: ...

    def backward_done(self, step: int) -> None: ...

    def updated(self, step: int, losses: list[float]) -> None: ...


def train(
    model: nn.Module,
    steps: int,
    *,
    broadcast: Callable[[nn.Module], object],
    make_optimizer: Callable[[nn.Module], AnyOptimizer],
    restore: Callable[[nn.Module, AnyOptimizer], int],
    batches: Callable[[int], Iterable[tuple[Tensor, Tensor]]],
    loss_of: Callable[[nn.Module, Tensor, Tensor], Tensor],
    backward: Callable[[Tensor, AnyOptimizer], object],
    save: Callable[[int, nn.Module, AnyOptimizer], object],
    observe: Callable[[nn.Module, AnyOptimizer], Observer],
) -> None:
    """Train `model` up to `steps` completed updates, starting from as many as `restore` says are done.

    The optimizer is built after the broadcast, so that master shards are cut from parameters all ranks agree on.
    `batches(step)` gives the micro-batches of the step that will be the `step`-th update, counted from 1.
    """
    broadcast(model)
    optimizer = make_optimizer(model)
    done = restore(model, optimizer)
    observer = observe(model, optimizer)
    observer.started(done)
    for step in range(done + 1, steps + 1):
        optimizer.zero_grad()
        losses = []
        for inputs, targets in batches(step):
            loss = loss_of(model, inputs, targets)
            backward(loss, optimizer)
            losses.append(loss.item())
        observer.backward_done(step)
        optimizer.step()
        observer.updated(step, losses)
        save(step, model, optimizer)
