"""The list of checks: what can be asked of an implementation, by name.

Owns the registry and what happens when a run ends in an error instead of evidence. Leaves each question to its file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from minigpt_dist.launch import DeadlineExceeded, LaunchError, RankDied, RankError
from minigpt_dist.verify.blame import raised_by_itself, stage_of, unwritten
from minigpt_dist.verify.contract import OURS, asked_by_name
from minigpt_dist.verify.peers import unavailable
from minigpt_dist.verify.subject import NotJudged, Subject
from minigpt_dist.verify.violation import Violation

WORLD_SIZES = (1, 2, 3, 4, 5, 8)


@dataclass(frozen=True)
class Check:
    """One question. `find(subject, world_size)` lists the violations, none if all is well; NotJudged if it cannot be asked.

    slots: pieces it is about. through: pieces that its run also goes through, where an implementation has them.
    stage: whom to blame when the run itself breaks. world_sizes: where it is asked by default.
    may_stop: as exotic, and a run that ends in any error or gets stuck is not judged either, but reported.
    exotic: a condition that an implementation may refuse: an exception is then no violation, a wrong result still is.
    in_words: it refuses only by a `raise` or `assert` of its own; an exception of what it calls is a violation.
    """

    name: str
    claim: str
    find: Callable[[Subject, int], list[Violation]]
    slots: tuple[str, ...]
    stage: str
    world_sizes: tuple[int, ...] = WORLD_SIZES
    exotic: bool = False
    may_stop: bool = False
    in_words: bool = False
    through: tuple[str, ...] = ()


OTHERS = (
    "site-packages",
    "site",
    OURS,
)  # folders of code that is not the submission's: a mistake shows there, and is not made there


CHECKS: dict[str, Check] = {}


def register(check: Check) -> Check:
    """Add a check under its name; names are unique."""
    if check.name in CHECKS:
        raise ValueError(f"check {check.name} is there twice")
    CHECKS[check.name] = check
    return check


@dataclass(frozen=True)
class Verdict:
    """The outcome of one check at one world size: passed, failed (with violations), or not judged (with the reason)."""

    check: str
    world_size: int
    violations: tuple[Violation, ...] = ()
    not_judged: str = ""

    @property
    def passed(self) -> bool:
        return not self.violations and not self.not_judged

    def render(self, impl: str) -> str:
        about = CHECKS[self.check].slots if self.check in CHECKS else ()
        slots = tuple(slot for slot in about if asked_by_name(slot, impl))
        return "\n\n".join(v.render(self.check, impl, self.world_size, slots) for v in self.violations)


def put(check: Check, subject: Subject, world_size: int) -> Verdict:
    """Ask one check. A run that broke is a violation of its own: who waits where, or which rank raised what."""
    absent = unavailable(subject.spec)
    if absent:
        return Verdict(check.name, world_size, not_judged=absent)
    try:
        violations = tuple(check.find(subject, world_size))
        if subject.lacks((*check.slots, *check.through)):
            raise NotJudged("it has no piece of its own for this: ours was asked")
        return Verdict(check.name, world_size, violations)
    except NotJudged as reason:
        return Verdict(check.name, world_size, not_judged=str(reason))
    except LaunchError as error:
        if check.may_stop and not subject.ours:
            return Verdict(check.name, world_size, not_judged=f"it stops: {str(error).splitlines()[0]}")
        if subject.traits is not None and isinstance(error, RankError) and error.kind == "MissingPieceError":
            return Verdict(
                check.name, world_size, not_judged=error.message
            )  # a peer is known, and owes no piece it never had
        if check.exotic and not subject.ours and _refusal(error, check.in_words):
            return Verdict(check.name, world_size, not_judged=f"it refuses: {_refusal(error)}")
        return Verdict(check.name, world_size, (broken_run(error, stage_of(error, check.stage)),))


def _refusal(error: LaunchError, in_words: bool = False) -> str:
    """The exception that a rank raised, in words; "" where the piece is absent or not written yet, which refuses nothing.

    in_words: "" too where it was raised by torch, or by the judge, and not by a statement of the piece itself.
    """
    if not isinstance(error, RankError) or error.kind == "MissingPieceError" or unwritten(error):
        return ""
    if in_words and not raised_by_itself(error):
        return ""
    return f"{error.kind}: {error.message}"


def broken_run(error: LaunchError, stage: str) -> Violation:
    """A run that ended in an error instead of evidence, as a violation."""
    if isinstance(error, DeadlineExceeded):
        waiting = "; ".join(f"rank {r} waits in {call} ({place})" for r, call, place in error.waiting) or "nobody waits"
        absent = f"; never came: rank {', '.join(map(str, error.absent))}" if error.absent else ""
        rank = error.absent[0] if error.absent else (error.waiting[0][0] if error.waiting else None)
        return Violation(
            "the run",
            f"stuck: {waiting}{absent}",
            "finished before its deadline",
            stage,
            rank=rank,
            hint="a collective must be called by every rank, the same number of times, in the same order",
        )
    if isinstance(error, RankError):
        if error.kind == "MissingPieceError":
            return Violation("the contract", error.message, "complete", "contract")
        if unwritten(error):
            hint = "nothing is wrong with it: it still raises NotImplementedError"
            return Violation(unwritten(error), "not written yet", "written", "contract", hint=hint)
        lines = [line.strip() for line in error.traceback.splitlines() if line.strip().startswith("File ")]
        last = [line for line in lines if not any(f"/{part}/" in line for part in OTHERS)] or lines
        hint = f"raised at {last[-1]}" if last and error.kind != "UneditableError" else ""
        return Violation(
            "the run", f"{error.kind}: {error.message}", "free of errors", stage, rank=error.rank, hint=hint
        )
    if isinstance(error, RankDied):
        return Violation(
            "the run", f"a dead rank (exit code {error.exitcode})", "alive to the end", stage, rank=error.rank
        )
    return Violation("the run", str(error).splitlines()[0], "free of errors", "launch")


def judge(subject: Subject, names: Iterable[str] = (), world_sizes: Iterable[int] = ()) -> list[Verdict]:
    """Put the named checks (default: all) at the given world sizes (default: each check's own)."""
    chosen = list(names) or list(CHECKS)
    unknown = [n for n in chosen if n not in CHECKS]
    if unknown:
        raise ValueError(f"check is {unknown[0]!r}, but should be one of {', '.join(CHECKS)}")
    sizes = tuple(world_sizes)
    return [put(CHECKS[n], subject, N) for n in chosen for N in (sizes or CHECKS[n].world_sizes)]
