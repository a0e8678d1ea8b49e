"""The training loop: forward, backward, log, and three calls in order - broadcast, step, save.

Owns the order of things. Leaves how ranks talk, where files go and what is recorded to the callables it is given:
it knows of no rank, no collective and no folder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeVar

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


class Guard(Protocol):
    """May look at a step before the update, and after it say from which step to go on."""

    def ask(self, model: nn.Module, losses: list[float]) -> None: ...

    def answer(self, step: int, model: nn.Module, optimizer: Any) -> int: ...


class Unguarded:
    """Asks nothing, and goes on from every step."""

    def ask(self, model: nn.Module, losses: list[float]) -> None: ...

    def answer(self, step: int, model: nn.Module, optimizer: Any) -> int:
        return step


def one_by_one(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    optimizer: AnyOptimizer,
    loss_of: Callable[[nn.Module, Tensor, Tensor], Tensor],
    backward: Callable[[Tensor, AnyOptimizer], object],
) -> list[float]:
    """Forward and backward of each micro-batch of a step; their losses. A batch and its graph live no longer than this call."""
    losses = []
    for inputs, targets in batches:
        loss = loss_of(model, inputs, targets)
        backward(loss, optimizer)
        losses.append(loss.item())
    return losses


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
    add_gradients: Callable[..., list[float]] = one_by_one,
    guard: Callable[[nn.Module, AnyOptimizer], Guard] = lambda model, optimizer: Unguarded(),
) -> None:
    """Train `model` up to `steps` completed updates, starting from as many as `restore` says are done.

    The optimizer is built after the broadcast, so that master shards are cut from parameters all ranks agree on.
    `batches(step)` gives the micro-batches of the step that will be the `step`-th update, counted from 1; `one_by_one` runs them, or
    an `add_gradients` that takes and returns the same (a pipeline). After an update the guard may have gone back to an earlier step:
    that update is then not saved, and training goes on from there.
    """
    broadcast(model)
    optimizer = make_optimizer(model)
    done = restore(model, optimizer)
    observer = observe(model, optimizer)
    observer.started(done)
    watch = guard(model, optimizer)
    while done < steps:
        step = done + 1
        optimizer.zero_grad()
        losses = add_gradients(model, batches(step), optimizer, loss_of, backward)
        observer.backward_done(step)
        watch.ask(model, losses)
        optimizer.step()
        observer.updated(step, losses)
        done = watch.answer(step, model, optimizer)
        if done == step:
            save(step, model, optimizer)
