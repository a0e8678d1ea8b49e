"""The kill matrix: every fault of the catalogue against the checks, so that the judge itself is judged.

Owns what is asked of which fault, in which order, and what counts as caught and as located. Leaves the faults to `faults/`, the
questions to `checks/`, and the tables to the command line.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

from minigpt_dist.verify.checks import CHECKS, Check, Verdict, put
from minigpt_dist.verify.contract import SLOTS
from minigpt_dist.verify.faults import FAULTS, LIST, Fault, unknown
from minigpt_dist.verify.subject import Subject
from minigpt_dist.verify.violation import Violation

DEADLINE_S = 60.0
HANG_S = 10.0  # for faults that are known to leave ranks waiting: each such run takes its whole deadline
FAMILIES = (
    "corpus",
    "model",
    "broadcast",
    "optimizer",
    "ddp",
    "fsdp",
    "checkpoint",
    "collectives",
    "pipeline",
    "guard",
    "tensor",
    "sequence",
    "clipping",
    "zero2",
    "zero3",
    "recompute",
    "precision",
)  # cheap and telling first; composed runs last
Extent = Literal["quick", "promised", "pieces", "all"]
PROVED_ELSEWHERE = {
    "tokens_once": "which tokens a rank reads is the loop's own doing: mutants of batches.py break it",
    "resume_bytes.altered": "only what ends in the right bytes without its checkpoint breaks it alone: an attack that trains again",
    "optimizer.traffic": "bytes are read only of a sandbox with a network of its own: attacks on the grader break it",
}
HANGS = 2  # a fault that has been stuck so often is asked only what its entry promises


@dataclass(frozen=True)
class Outcome:
    """What became of one fault at one world size. Verdicts and seconds are in the order asked."""

    fault: Fault
    world_size: int
    verdicts: tuple[Verdict, ...]
    seconds: tuple[float, ...]

    @property
    def equivalent(self) -> str:
        """Why it cannot be told from a correct implementation at this world size; "" where it can."""
        return dict(self.fault.equivalent).get(self.world_size, "")

    @property
    def caught_by(self) -> tuple[Verdict, ...]:
        return tuple(v for v in self.verdicts if v.violations)

    @property
    def named(self) -> Violation | None:
        """What the check that ought to catch it said first; None if it said nothing."""
        return next((v.violations[0] for v in self.caught_by if v.check == self.fault.check), None)

    @property
    def stage_right(self) -> bool:
        return self.named is not None and self.named.stage == self.fault.stage

    @property
    def located(self) -> bool:
        """Were stage, step, rank and tensor named as the entry says they are?"""
        named, fault = self.named, self.fault
        pairs = ((fault.step, named.step), (fault.rank, named.rank), (fault.tensor, named.tensor)) if named else ()
        return self.stage_right and all(wanted is None or wanted == seen for wanted, seen in pairs)

    @property
    def red_greens(self) -> tuple[str, ...]:
        """Checks that were promised to stay green and did not."""
        return tuple(v.check for v in self.caught_by if v.check in self.fault.green)

    @property
    def as_promised(self) -> bool:
        """Caught by the check that ought to, where it can be, and by none that was promised to stay green."""
        return (not self.caught_by if self.equivalent else self.named is not None) and not self.red_greens

    @property
    def complaint(self) -> str:
        """What is not as the entry promises; "" if caught by the check that ought to, where it is, and by none promised green."""
        fault, caught = self.fault, ", ".join(v.check for v in self.caught_by)
        if self.equivalent:
            return f"caught by {caught}, but should be equivalent" if caught else ""
        if self.named is None:
            return (
                f"not caught by {fault.check}, which ought to; by {caught}"
                if caught
                else f"SURVIVES {fault.check}{self._open()}"
            )
        if self.red_greens:
            return f"should be green: {', '.join(self.red_greens)}"
        place = {"stage": fault.stage, "step": fault.step, "rank": fault.rank, "tensor": fault.tensor}
        wrong = [f"{name} {value}" for name, value in place.items() if value not in (None, getattr(self.named, name))]
        return f"should be named at {', '.join(wrong)}" if wrong else ""

    def _open(self) -> str:
        """Why the check that ought to catch it could not be put."""
        return "".join(f" ({v.not_judged})" for v in self.verdicts if v.check == self.fault.check and v.not_judged)


def replaced(names: Iterable[str]) -> set[str]:
    """The pieces that replacing these names of the contract replaces."""
    return {slot for slot, parts in SLOTS.items() if set(names) & set(parts)}


def questions(fault: Fault, world_size: int, extent: Extent) -> list[Check]:
    """The checks to put to a fault, cheap and telling ones first.

    quick: the check that ought to catch it. promised: also those promised green, which is all that its entry says. pieces: also all
    that probe its pieces alone. all: also runs of the whole composition, which take longer than all probes together.
    """
    if extent == "quick":
        return [CHECKS[fault.check]]
    if extent == "promised":
        return sorted(map(CHECKS.__getitem__, (fault.check, *fault.green)), key=_cost)
    slots = replaced(fault.names())
    about = [c for c in CHECKS.values() if slots & set(c.slots) and world_size in c.world_sizes]
    asked = [c for c in about if extent == "all" or len(c.slots) == 1]
    return sorted(dict.fromkeys([*asked, CHECKS[fault.check], *(CHECKS[name] for name in fault.green)]), key=_cost)


def _cost(check: Check) -> int:
    family = check.name.partition(".")[0]
    return FAMILIES.index(family) if family in FAMILIES else len(FAMILIES)


def judge_fault(
    fault: Fault, *, world_size: int = 0, extent: Extent = "pieces", deadline_s: float = DEADLINE_S
) -> Outcome:
    """Put the checks to one fault, on ranks of its own, at its own world size unless told another."""
    N = world_size or fault.world_size
    promised = {fault.check, *fault.green}
    verdicts: list[Verdict] = []
    seconds: list[float] = []
    with Subject(f"fault:{fault.name}", deadline_s=min(deadline_s, HANG_S) if fault.hangs else deadline_s) as subject:
        for check in questions(fault, N, extent):
            if sum(map(_stuck, verdicts)) >= HANGS and check.name not in promised:
                continue
            start = time.perf_counter()
            verdicts.append(_put(check, subject, N))
            seconds.append(time.perf_counter() - start)
    return Outcome(fault, N, tuple(verdicts), tuple(seconds))


def _put(check: Check, subject: Subject, world_size: int) -> Verdict:
    """Ask one check. Where a fault breaks the judge itself, that is the judge's fault, and no catch."""
    try:
        return put(check, subject, world_size)
    except Exception as error:
        return Verdict(check.name, world_size, not_judged=f"the judge broke: {type(error).__name__}: {error}")


def _stuck(verdict: Verdict) -> bool:
    return any(v.observed.startswith("stuck") for v in verdict.violations)


def judge_all(faults: Iterable[Fault], judge: Callable[[Fault], Outcome], workers: int = 0) -> Iterator[Outcome]:
    """One outcome a fault, in the order given, several at a time: a stuck one waits for its deadline while others use the cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    with ThreadPoolExecutor(workers or cores + 2) as pool:
        yield from pool.map(judge, faults)


def chosen(names: Iterable[str]) -> list[Fault]:
    """The faults named, by their own name or that of their file; all for none. ValueError for a name that is neither."""
    wanted = list(names)
    known = dict.fromkeys([*FAULTS, *(f.file for f in FAULTS.values())])
    for name in wanted:
        if name not in known:
            raise unknown("fault", name, known, LIST)
    return [f for f in FAULTS.values() if not wanted or f.name in wanted or f.file in wanted]


def unneeded(outcomes: Iterable[Outcome]) -> list[str]:
    """Checks that no fault needs: no fault names them as the check that must fail, and none is caught by them alone.

    Those that no fault of the contract can break are left out: they have their own proofs.
    """
    outcomes = list(outcomes)
    needed = {o.fault.check for o in outcomes}
    needed |= {o.caught_by[0].check for o in outcomes if len(o.caught_by) == 1}
    return [name for name in CHECKS if name not in needed and name not in PROVED_ELSEWHERE]
