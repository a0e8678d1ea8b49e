"""Does an implementation's guard see a bad step wherever it happens, and only there, with one answer on all ranks?"""

from __future__ import annotations

from typing import Any

from minigpt_dist.verify.checks.registry import Check, register
from minigpt_dist.verify.guard_probe import guard_body
from minigpt_dist.verify.subject import NotJudged, Subject
from minigpt_dist.verify.violation import Violation

SLOT, STAGE, SIZES = ("guard",), "guard", (1, 2, 3, 4)
Case = dict[str, Any]


def step(*losses: float | str, last: float | str = 1.0, at: int = -1, value: str = "nan", size: float = 1.0) -> Case:
    """One step: losses by rank, in turns; `value` in one gradient of rank `at`. Numbers travel as text: JSON has no NaN."""
    told = [str(loss) for loss in losses]
    return {"losses": told, "last": str(last), "at": at, "value": value, "size": size}


def answered(subject: Subject, world_size: int, steps: list[tuple[Case, bool, str]]) -> list[Violation]:
    """Every rank gives the right answer at every step. steps: what happens, whether it is bad, and in words."""
    results = subject.ask(guard_body, world_size, [case for case, *_ in steps])
    if "not_judged" in results[0]:
        raise NotJudged(results[0]["not_judged"])
    for k, (_, bad, words) in enumerate(steps):
        for rank, r in enumerate(results):
            if r["answers"][k] is not bad:
                what = f"should_roll_back, {words},"
                return [Violation(what, str(r["answers"][k]), str(bad), STAGE, step=k + 1, rank=rank)]
    return []


def not_finite_loss(subject: Subject, world_size: int) -> list[Violation]:
    """NaN, inf and -inf in the loss of one rank, each rank in turn."""
    steps = [
        (
            step(*("1.0" if r != bad else value for r in range(world_size))),
            True,
            f"with a loss of {value} on rank {bad}",
        )
        for bad in reversed(range(world_size))
        for value in ("nan", "inf", "-inf")
    ]
    return answered(subject, world_size, steps)


def not_finite_gradient(subject: Subject, world_size: int) -> list[Violation]:
    """One element of one gradient of one rank."""
    steps = [
        (step(1.0, at=bad, value=value), True, f"with {value} in a gradient of rank {bad}")
        for bad in reversed(range(world_size))
        for value in ("nan", "inf", "-inf")
    ]
    return answered(subject, world_size, steps)


def spike(subject: Subject, world_size: int) -> list[Violation]:
    """It is the mean over ranks that jumps: one rank alone may, and all a little may not."""
    mean = [1.0] * (world_size - 1) + [1.0 + 1.5 * world_size]
    calm = [0.1] * (world_size - 1) + [1.25 * world_size - 0.1 * (world_size - 1)]
    steps = [
        (step(2.5), True, "with a mean loss of 2.5 after 1"),
        (step(*mean), True, "with a mean loss of 2.5 after 1, most of it on the last rank"),
        (step(*calm), False, "with a mean loss of 1.25 after 1, most of it on the last rank"),
        (step(4.5, last=2.5), False, "with a mean loss of 4.5 after 2.5"),
    ]
    return answered(subject, world_size, steps)


def quiet(subject: Subject, world_size: int) -> list[Violation]:
    """No alarm: a falling loss, one that doubles exactly, no step before, finite gradients whose sum is not."""
    steps = [
        (step(0.9), False, "with a falling loss"),
        (step(2.0), False, "with a loss that doubles exactly"),
        (step(50.0, last="nan"), False, "at the first step"),
        (step(1.0, size=3e38), False, "with finite gradients whose sum overflows"),
    ]
    return answered(subject, world_size, steps)


def recovers(subject: Subject, world_size: int) -> list[Violation]:
    """After a bad step the next good one is good."""
    steps = [
        (step(1.0), False, "at a good step"),
        (step(*["1.0"] * (world_size - 1), "nan"), True, "with a loss of nan on the last rank"),
        (step(1.0), False, "at a good step after a bad one"),
        (step(1.0, at=0, value="inf"), True, "with inf in a gradient of rank 0"),
        (step(1.0), False, "at a good step after a bad one"),
    ]
    return answered(subject, world_size, steps)


for _name, _claim, _find in (
    ("loss", "a loss that is not finite on any rank is bad for all", not_finite_loss),
    ("gradient", "a gradient that is not finite on any rank is bad for all", not_finite_gradient),
    ("spike", "a mean loss above twice the last is bad", spike),
    ("quiet", "a good step raises no alarm", quiet),
    ("recovers", "a bad step is forgotten by the next", recovers),
):
    register(Check(f"guard.{_name}", _claim, _find, SLOT, STAGE, SIZES))
