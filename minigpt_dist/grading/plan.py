"""The order of asking: which checks share ranks, which come first, and which are spared after one got stuck.

Owns the division into groups. It does not depend on the number of workers, so neither do the answers: a group is always asked by one
worker, on ranks of its own, from its first question to its last.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from minigpt_dist.grading.answers import Answer, Unit, ask
from minigpt_dist.grading.rubric import Item
from minigpt_dist.verify.checks import CHECKS
from minigpt_dist.verify.subject import Subject

FAMILIES = ("run", "pieces", "checkpoint")  # the longest first, so that no worker is left alone with them


@dataclass(frozen=True)
class Step:
    """The checks of one item, and the items whose getting stuck spares it."""

    item: str
    requires: tuple[str, ...]
    checks: tuple[str, ...]


@dataclass(frozen=True)
class Group:
    """Checks of one family at one world size: they share runs and ranks."""

    family: str
    world_size: int
    steps: tuple[Step, ...]

    @property
    def name(self) -> str:
        return f"{self.family}@{self.world_size}"

    @property
    def units(self) -> tuple[Unit, ...]:
        return tuple(dict.fromkeys(Unit(c, self.world_size) for s in self.steps for c in s.checks))

    def to_dict(self) -> dict[str, Any]:
        steps = [[s.item, list(s.requires), list(s.checks)] for s in self.steps]
        return {"family": self.family, "world_size": self.world_size, "steps": steps}

    @classmethod
    def from_dict(cls, row: dict[str, Any]) -> Group:
        steps = tuple(Step(item, tuple(requires), tuple(checks)) for item, requires, checks in row["steps"])
        return cls(row["family"], row["world_size"], steps)


def family_of(check: str) -> str:
    """run: the whole composition. checkpoint: probes of saving and loading. pieces: probes of every other piece."""
    slots = CHECKS[check].slots
    return "run" if len(slots) > 1 else "checkpoint" if slots == ("checkpoint",) else "pieces"


def plan(items: Iterable[Item]) -> list[Group]:
    """The groups that answer `items`, the longest first. Contract items need none."""
    steps: dict[tuple[str, int], list[Step]] = {}
    for item in items:
        for family in FAMILIES:
            checks = tuple(c for c in item.checks if c in CHECKS and family_of(c) == family)
            for N in item.world_sizes if checks else ():
                steps.setdefault((family, N), []).append(Step(item.id, item.requires, checks))
    order = sorted(steps, key=lambda key: (-key[1] * (key[0] == "run"), FAMILIES.index(key[0]), -key[1]))
    return [Group(family, N, tuple(steps[family, N])) for family, N in order]


def unanswered(groups: Iterable[Group], answered: Collection[Unit]) -> list[Group]:
    """What is left of each group without the steps that have been answered; none of a group of which nothing is left."""
    found = []
    for group in groups:
        N = group.world_size
        steps = tuple(s for s in group.steps if any(Unit(c, N) not in answered for c in s.checks))
        if steps:
            found.append(Group(group.family, N, steps))
    return found


def answers(group: Group, subject: Subject) -> Iterator[Answer]:
    """Ask a group's checks in order. An item of which a check got stuck, and what requires it, is asked nothing more at this size.

    What requires an item that fails here is left open: whether it is asked at all depends on what that item earns elsewhere.
    """
    stuck: dict[str, str] = {}
    lost: set[str] = set()
    found: dict[Unit, Answer] = {}
    spared: dict[Unit, str] = {}
    for step in group.steps:
        if lost.intersection(step.requires) and not stuck.keys() & {*step.requires}:
            lost.add(step.item)
            continue
        for unit in (Unit(check, group.world_size) for check in step.checks):
            blame = next((stuck[i] for i in (step.item, *step.requires) if i in stuck), "")
            if blame:
                spared[unit] = blame
            elif unit not in found:
                found[unit] = ask(subject, unit)
                yield found[unit]
            _note(stuck, lost, step, found.get(unit), blame)
    for unit, blame in spared.items():
        if unit not in found:
            yield Answer(*unit, "timeout", f"not asked, because {blame} got stuck at this world size")


def _note(stuck: dict[str, str], lost: set[str], step: Step, answer: Answer | None, blame: str) -> None:
    if blame:
        stuck.setdefault(step.item, blame)
    elif answer is not None and answer.outcome == "timeout":
        stuck.setdefault(step.item, answer.check)
    if answer is None or answer.outcome not in ("passed", "not_judged"):
        lost.add(step.item)


def merged(groups: Sequence[Group]) -> list[Unit]:
    """Every unit of all groups, once."""
    return list(dict.fromkeys(unit for group in groups for unit in group.units))
