"""From answers to points: which items a submission is asked, what it earned, and one line for each that says why.

Owns the rules of partial credit, of `requires`, and of what leaves the maximum. A pure function of the rubric, of what the submission
offers, and of the answers so far. Leaves the report's shape to `report`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from minigpt_dist.grading.answers import Answer, Unit, clipped
from minigpt_dist.grading.rubric import SHAPES, Item, Rubric
from minigpt_dist.verify.contract import SLOTS

EARNED_NOTHING = ("failed", "skipped", "timeout", "crashed")
DIGITS = 4  # of points: thirds add up to a whole


@dataclass(frozen=True)
class Offer:
    """What a submission was found to offer. `asked` are the slots that the person who grades restricted it to."""

    shape: str
    names: frozenset[str]
    borrowed: Mapping[str, str] = field(default_factory=dict)
    asked: tuple[str, ...] = ()
    stood_in: tuple[str, ...] = ()

    @classmethod
    def of(cls, found: Mapping[str, Any], asked: tuple[str, ...]) -> Offer:
        """From what a rank said, which is a claim: anything of another type is dropped."""
        known = {n for names in SLOTS.values() for n in names}
        claimed, borrowed = found.get("names"), found.get("borrowed")
        names = frozenset(n for n in known if n in claimed) if isinstance(claimed, list) else frozenset()
        works = {k: clipped(str(v)) for k, v in borrowed.items() if k in known} if isinstance(borrowed, dict) else {}
        stood_in = found.get("stood_in")
        absent = tuple(clipped(str(n)) for n in stood_in) if isinstance(stood_in, list) else ()
        shape = found.get("shape")
        return cls(shape if shape in SHAPES else SHAPES[0], names, works, asked, absent)

    def has(self, slot: str) -> bool:
        return all(n in self.names for n in SLOTS[slot])

    @property
    def slots(self) -> frozenset[str]:
        """Pieces of which it offers at least a part."""
        return frozenset(slot for slot, names in SLOTS.items() if self.names.intersection(names))


@dataclass(frozen=True)
class Result:
    """What became of an item. `excused`: it cannot be asked, so its points are no part of the maximum."""

    item: Item
    outcome: str
    points: float = 0.0
    message: str = ""
    evidence: dict[str, Any] | None = None
    seconds: float = 0.0

    @property
    def most(self) -> float:
        """Points that could be earned."""
        return 0.0 if self.outcome == "excused" else self.item.points


class Scorer:
    """Points of one submission."""

    def __init__(self, rubric: Rubric, offer: Offer) -> None:
        self.rubric, self.offer = rubric, offer
        self.lesson = offer.shape == "lesson" or offer.shape not in rubric.accepts
        required = offer.asked or (rubric.lesson if self.lesson else ())
        self.expected = frozenset(required) | (offer.slots if not offer.asked else frozenset())

    def applies(self, item: Item) -> bool:
        """Is this item about a piece that the submission has, or ought to have? Of pieces asked for, one that its checks must exercise."""
        pieces = item.slots if self.offer.asked else item.about or item.slots
        return bool(self.expected & pieces)

    def broken(self, slot: str) -> str:
        """What is wrong with a piece of the contract; "" for nothing."""
        missing = [n for n in SLOTS[slot] if n not in self.offer.names]
        if missing:
            return f"{' and '.join(missing)} {'are' if len(missing) > 1 else 'is'} missing"
        works = [f"{n} is {self.offer.borrowed[n]}" for n in SLOTS[slot] if n in self.offer.borrowed]
        if works and self.rubric.borrowed == "refuse":
            return f"{works[0]}, not the submission's own work"
        return ""

    def answerable(self, item: Item) -> bool:
        """Can its checks be put: it applies, and no piece that they need is broken?"""
        return self.applies(item) and not any(self.broken(slot) for slot in item.slots & self.expected)

    def results(self, answers: Mapping[Unit, Answer]) -> dict[str, Result]:
        """Every item of the rubric, by id."""
        found: dict[str, Result] = {}
        for item in self.rubric.items:
            self._settle(item, answers, found)
        return found

    def _settle(self, item: Item, answers: Mapping[Unit, Answer], found: dict[str, Result]) -> Result:
        if item.id not in found:
            needed = [self._settle(self.rubric.item(id), answers, found) for id in item.requires]
            found[item.id] = self._result(item, answers, needed)
        return found[item.id]

    def _result(self, item: Item, answers: Mapping[Unit, Answer], needed: list[Result]) -> Result:
        if not self.applies(item):
            pieces = ", ".join(sorted(item.about or item.slots))
            return Result(item, "excused", message=f"not asked: the submission has no piece of {pieces}")
        broken = {slot: why for slot in sorted(item.slots & self.expected) if (why := self.broken(slot))}
        if item.is_contract:
            why = "; ".join(broken.values())
            return Result(item, "failed", message=why) if why else Result(item, "passed", item.points)
        if broken:
            return Result(item, "skipped", message=f"skipped: {'; '.join(broken.values())}")
        lost = [r.item for r in needed if r.outcome in EARNED_NOTHING]
        if lost:
            named = ", ".join(f"{i.id} ({i.title[0].lower()}{i.title[1:]})" for i in lost)
            return Result(item, "skipped", message=f"skipped: it requires {named}, which earned nothing")
        return self._judged(item, answers)

    def _judged(self, item: Item, answers: Mapping[Unit, Answer]) -> Result:
        """Points for the world sizes that hold, of those that could be asked."""
        rows = {N: [answers.get(Unit(c, N), Answer(c, N, "not_run")) for c in item.checks] for N in item.world_sizes}
        flat = [a for row in rows.values() for a in row]
        seconds = math.fsum(a.seconds for a in flat)
        if any(a.outcome == "not_run" for a in flat):
            return Result(item, "not_run", seconds=seconds)
        holds = {N: h for N, row in rows.items() if (h := self._holds(item, row)) is not None}
        if not holds:
            reason = next((a.message for a in flat if a.outcome == "not_judged"), "")
            return Result(item, "excused", message=f"not judged: {reason}", seconds=seconds)
        part = sum(holds.values()) / len(holds)
        if max(holds) > 1 and not any(h for N, h in holds.items() if N > 1):
            part = 0.0  # one process alone shows nothing of what ranks do together
        points = round(item.points * part, DIGITS)
        if part == 1.0:
            return Result(item, "passed", points, message=_open(flat), seconds=seconds)
        first = next(a for a in flat if a.outcome not in ("passed", "not_judged") or self._loses(item, a))
        outcome = "partial" if part > 0 else "failed" if first.outcome == "not_judged" else first.outcome
        return Result(item, outcome, points, _line(first, holds), first.evidence, seconds)

    def _holds(self, item: Item, row: list[Answer]) -> bool | None:
        """Does the item hold at one world size? None where nothing could be asked that counts."""
        if any(a.outcome not in ("passed", "not_judged") or self._loses(item, a) for a in row):
            return False
        return True if any(a.outcome == "passed" for a in row) else None

    def _loses(self, item: Item, answer: Answer) -> bool:
        return answer.outcome == "not_judged" and item.unjudged == "lost" and self.lesson


def _line(first: Answer, holds: Mapping[int, bool]) -> str:
    """What a student reads: where it first went wrong, and at which world sizes it holds."""
    place = [f"world size {first.world_size}"]
    for name in ("step", "rank"):
        if first.evidence and name in first.evidence:
            place.append(f"{name} {first.evidence[name]}")
    good = [str(N) for N, h in holds.items() if h]
    kept = f"; it holds at world size {', '.join(good)}" if good else ""
    return f"{first.check}, {', '.join(place)}: {first.message}{kept}"


def _open(flat: list[Answer]) -> str:
    """What could not be asked of an item that passed, by check."""
    reasons = {a.check: a.message for a in flat if a.outcome == "not_judged"}
    return "; ".join(f"{check} not judged: {why}" for check, why in reasons.items())


def total(results: Mapping[str, Result]) -> tuple[float, float]:
    """(score, maximum) over the items that are not excused."""
    rows = results.values()
    return round(math.fsum(r.points for r in rows), DIGITS), round(math.fsum(r.most for r in rows), DIGITS)
