"""One check put to one submission at one world size, as plain data that crosses between processes and is kept on disk.

Owns the words of an outcome, and what of a violation a report shows. Leaves asking to `verify`, and points to `scoring`.
"""

from __future__ import annotations

import re
import struct
import time
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from minigpt_dist.verify.checks import CHECKS, Verdict, put
from minigpt_dist.verify.subject import Subject
from minigpt_dist.verify.violation import Violation

OUTCOMES = ("passed", "failed", "not_judged", "timeout", "crashed", "not_run")
MAX_TEXT = 2000  # characters of a submission's own words in a report
_NUMBER = re.compile(r"-?\d+(\.\d+)?(e[+-]?\d+)?(?=$|[ ,;(])")


class Unit(NamedTuple):
    """A check at a world size."""

    check: str
    world_size: int


@dataclass(frozen=True)
class Answer:
    """What became of a unit. `message` says it in one line; `evidence` is the first violation, as far as there is one."""

    check: str
    world_size: int
    outcome: str
    message: str = ""
    evidence: dict[str, Any] | None = None
    seconds: float = 0.0

    @property
    def unit(self) -> Unit:
        return Unit(self.check, self.world_size)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, row: dict[str, Any]) -> Answer:
        """The inverse of `to_dict`. ValueError for anything else."""
        try:
            answer = cls(**row)
        except TypeError as error:
            raise ValueError(f"answer is {str(row)[:80]!r}: {error}") from None
        if answer.outcome not in OUTCOMES:
            raise ValueError(f"outcome is {answer.outcome!r}, but should be one of {', '.join(OUTCOMES)}")
        return answer


def ask(subject: Subject, unit: Unit) -> Answer:
    """Put one check. What breaks in the check itself, on evidence that makes no sense, is an outcome too: it earns nothing.

    Raises OSError and MemoryError where this machine, not the submission, is to blame.
    """
    start = time.perf_counter()
    try:
        verdict = put(CHECKS[unit.check], subject, unit.world_size)
        return answer_of(verdict, time.perf_counter() - start)
    except (OSError, MemoryError):
        raise
    except Exception as error:  # a check may trip in any way over what a submission's ranks sent
        message = f"the check could not be carried out on what the ranks sent: {type(error).__name__}: {error}"
        return Answer(*unit, "crashed", clipped(message), None, time.perf_counter() - start)


def answer_of(verdict: Verdict, seconds: float) -> Answer:
    """A verdict as plain data."""
    unit = (verdict.check, verdict.world_size)
    if verdict.not_judged:
        return Answer(*unit, "not_judged", clipped(verdict.not_judged), None, seconds)
    if not verdict.violations:
        return Answer(*unit, "passed", "", None, seconds)
    first = verdict.violations[0]
    message = f"{first.what} is {first.observed}, but should be {first.expected}"
    return Answer(*unit, _outcome(first), clipped(message), evidence_of(verdict, first), seconds)


def _outcome(violation: Violation) -> str:
    if violation.what == "the run" and violation.observed.startswith("stuck"):
        return "timeout"
    dead = violation.what == "the run" and violation.observed.startswith("a dead rank")
    return "crashed" if dead else "failed"


def evidence_of(verdict: Verdict, violation: Violation) -> dict[str, Any]:
    """Where a violation is, and both values; floats of a tensor also as the bits of their float32."""
    found: dict[str, Any] = {"check": verdict.check, "world_size": verdict.world_size}
    for name in ("rank", "step", "stage", "tensor", "element", "what", "observed", "expected", "hint"):
        value = getattr(violation, name)
        if name in ("rank", "step", "element"):
            if type(value) is int and 0 <= value < 1 << 53:  # what a rank calls its step may be anything
                found[name] = value
        elif value is not None and value != "":
            found[name] = clipped(str(value))
    if violation.element is not None:
        for name in ("observed", "expected"):
            bits = _float32_bits(found.get(name, ""))
            if bits:
                found[f"{name}_hex"] = bits
    return found


def _float32_bits(text: str) -> str:
    """`0x3f800000` for a text that begins with the number 1; "" for one without a number, or beyond float32."""
    number = _NUMBER.match(text)
    try:
        return f"0x{struct.unpack('>I', struct.pack('>f', float(number[0])))[0]:08x}" if number else ""
    except OverflowError:
        return ""


def clipped(text: str) -> str:
    """`text` on one line, its middle left out where it is long, and without characters that a terminal or XML would obey."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    half = MAX_TEXT // 2
    return line if len(line) <= MAX_TEXT else f"{line[:half]} ... {line[-half:]}"
