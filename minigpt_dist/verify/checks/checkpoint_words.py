"""How checks of the checkpoint piece ask, compare, and say what they saw.

Owns the words shared by `checkpoint.py`, `checkpoint_refusals.py` and `checkpoint_crash.py`. World size here is the
number of states; all of it runs on one rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from minigpt_dist.verify.checkpoint_probe import probe_body
from minigpt_dist.verify.checkpoint_states import Census, censuses, difference, lesson_states
from minigpt_dist.verify.checkpoint_store import Rows
from minigpt_dist.verify.checks.registry import Check, register
from minigpt_dist.verify.subject import Subject
from minigpt_dist.verify.violation import Violation

Find = Callable[[Subject, int], list[Violation]]


class CannotAsk(Exception):  # noqa: N818 - what happened reads better than what it is
    """Even an undisturbed save failed; the violation says how."""

    def __init__(self, violation: Violation) -> None:
        super().__init__(violation.what)
        self.violation = violation


def asked(subject: Subject, probe: str, *args: Any) -> Rows:
    """The rows of one probe, in a folder that is gone afterwards. CannotAsk if a plain save already fails."""
    with subject.area() as area:
        answer = subject.ask(probe_body, 1, probe, area, *args)[0]
    if "broken" in answer:
        raise CannotAsk(Violation("save_sharded, undisturbed,", str(answer["broken"]), "returned", "save"))
    rows: Rows = answer["rows"]
    return rows


def check(name: str, claim: str, find: Find, world_sizes: tuple[int, ...] = (2,), stage: str = "load") -> None:
    """Register a check of the checkpoint piece; a save that fails by itself is its violation."""

    def guarded(subject: Subject, world_size: int) -> list[Violation]:
        try:
            return find(subject, world_size)
        except CannotAsk as reason:
            return [reason.violation]

    register(Check(f"checkpoint.{name}", claim, guarded, ("checkpoint",), stage, world_sizes))


def told(loaded: dict[str, Any]) -> str:
    """What a load did, in words."""
    if "states" in loaded:
        return "loaded"
    return f"refused ({loaded['refused']})" if "refused" in loaded else str(loaded["wrong"])


def unequal(
    loaded: dict[str, Any], wanted: list[Census], case: str, stage: str = "load", step: int | None = 10, hint: str = ""
) -> list[Violation]:
    """Nothing if exactly the wanted states were loaded; else the first place where they differ, or what happened."""
    if "states" not in loaded:
        return [Violation(f"the load of {case}", told(loaded), "the saved states", stage, step=step, hint=hint)]
    found = difference(loaded["states"], wanted)
    if found is None:
        return []
    rank, path, seen, right = found
    return [
        Violation(
            f"what was loaded of {case}",
            seen,
            f"{right}, as saved",
            stage,
            step=step,
            rank=rank,
            tensor=path,
            hint=hint,
        )
    ]


def first(found: list[list[Violation]]) -> list[Violation]:
    """The first that is not empty."""
    return next((violations for violations in found if violations), [])


def saved(world_size: int, version: int = 1) -> list[Census]:
    """The census of the states of one version."""
    return censuses(lesson_states(world_size, version))


def deliberate(refusal: str) -> bool:
    """Does an error say that something exists already?"""
    return any(word in refusal for word in ("FileExistsError", "exist", "already"))
