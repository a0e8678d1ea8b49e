"""The loop calls its pieces in order; recording fakes stand in for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from minigpt_dist.loop import train


class FakeOptimizer:
    def __init__(self, calls: list[str]) -> None:
        self.calls = calls

    def zero_grad(self) -> None:
        self.calls.append("zero_grad")

    def step(self) -> None:
        self.calls.append("step")


class FakeObserver:
    def __init__(self, calls: list[str]) -> None:
        self.calls = calls

    def started(self, step: int) -> None:
        self.calls.append(f"started {step}")

    def backward_done(self, step: int) -> None:
        self.calls.append(f"backward_done {step}")

    def updated(self, step: int, losses: list[float]) -> None:
        self.calls.append(f"updated {step} {losses}")


class GoesBackOnce:
    """Sends the loop back to step 1 after the first update of step 3."""

    def __init__(self, calls: list[str]) -> None:
        self.calls, self.back = calls, False

    def ask(self, model: nn.Module, losses: list[float]) -> None:
        self.calls.append(f"ask {losses}")

    def answer(self, step: int, model: nn.Module, optimizer: Any) -> int:
        first, self.back = step == 3 and not self.back, self.back or step == 3
        return 1 if first else step


def calls_of(done: int, steps: int, micro_batches: int = 1, guarded: bool = False) -> list[str]:
    """Every call the loop makes, in order."""
    calls: list[str] = []
    guard = {"guard": lambda model, optimizer: note("guard", GoesBackOnce(calls))} if guarded else {}

    def note(name: str, value: Any = None) -> Any:
        calls.append(name)
        return value

    def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return note("forward", torch.tensor(2.0, requires_grad=True))  # type: ignore[no-any-return]  # note passes it through

    train(
        nn.Identity(),
        steps,
        broadcast=lambda model: note("broadcast"),
        make_optimizer=lambda model: note("make_optimizer", FakeOptimizer(calls)),
        restore=lambda model, optimizer: note("restore", done),
        batches=lambda step: note(f"batches {step}") or [(torch.zeros(1), torch.zeros(1))] * micro_batches,
        loss_of=loss_of,
        backward=lambda loss, optimizer: note("backward"),
        save=lambda step, model, optimizer: note(f"save {step}"),
        observe=lambda model, optimizer: note("observe", FakeObserver(calls)),
        **guard,
    )
    return calls


START = ["broadcast", "make_optimizer", "restore", "observe"]
ONE_STEP = ["zero_grad", "batches 1", "forward", "backward", "backward_done 1", "step", "updated 1 [2.0]", "save 1"]


def test_broadcast_comes_before_the_optimizer_and_each_step_is_in_order() -> None:
    assert calls_of(done=0, steps=1) == [*START, "started 0", *ONE_STEP]


def test_micro_batches_share_one_step() -> None:
    middle = [
        "zero_grad",
        "batches 1",
        "forward",
        "backward",
        "forward",
        "backward",
        "backward_done 1",
        "step",
        "updated 1 [2.0, 2.0]",
        "save 1",
    ]
    assert calls_of(done=0, steps=1, micro_batches=2) == [*START, "started 0", *middle]


def test_a_resumed_run_goes_on_after_the_last_completed_step() -> None:
    assert [c for c in calls_of(done=3, steps=5) if c.startswith(("started", "save"))] == [
        "started 3",
        "save 4",
        "save 5",
    ]


def test_a_finished_run_trains_no_further() -> None:
    assert calls_of(done=5, steps=5) == [*START, "started 5"]


def test_a_guard_is_asked_before_the_update_and_its_step_is_gone_on_from_and_not_saved() -> None:
    calls = calls_of(done=1, steps=3, guarded=True)
    assert calls[3:6] == ["observe", "started 1", "guard"]
    assert calls[6:14] == [
        *["zero_grad", "batches 2", "forward", "backward", "backward_done 2", "ask [2.0]", "step", "updated 2 [2.0]"]
    ]
    assert [c for c in calls if c.startswith(("updated", "save"))] == [
        *["updated 2 [2.0]", "save 2", "updated 3 [2.0]"],  # which is taken back
        *["updated 2 [2.0]", "save 2", "updated 3 [2.0]", "save 3"],
    ]
