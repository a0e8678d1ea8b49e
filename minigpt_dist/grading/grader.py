"""The inside of a grading process: one submission's subject, groups asked one after another.

Owns the subject's life, its isolation and its seed. Used by `worker` in processes of its own, and by `crew` in the grader itself
(`-n 0`), so that both do the same. Leaves planning to `plan`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from minigpt_dist.grading.answers import Answer, clipped
from minigpt_dist.grading.plan import Group, answers
from minigpt_dist.launch import DeadlineExceeded, LaunchError, RankDied, RankError
from minigpt_dist.launch.errors import ServerLost, WireError
from minigpt_dist.launch.sandbox import Isolation
from minigpt_dist.verify.inspection import inspect_body
from minigpt_dist.verify.subject import Subject

IMPORT_DEADLINE_S = 30.0
OURS = (LaunchError, OSError, MemoryError)  # what leaves a grader is no submission's doing: a full disk, no sandbox
_LINE = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+)', re.MULTILINE)
_OURS = f"{os.sep}minigpt_dist{os.sep}"
_CLAIMED = {"shape": str, "slots": list, "names": list, "origins": dict, "borrowed": dict, "stood_in": list}


@dataclass(frozen=True)
class Order:
    """What a grading process is told of a submission. spec, slots: as `Subject` takes them. deadline_s: of one run.

    isolation: the name of a mode that is known to work here; "" for the process's own rank server, without any.
    """

    spec: str
    slots: tuple[str, ...] = ()
    deadline_s: float = 20.0
    isolation: str = "none"
    seed: int | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, row: dict[str, Any]) -> Order:
        return cls(**{**row, "slots": tuple(row["slots"])})


class Grader:
    """A submission under judgement in this process. A context manager: leaving it ends every rank."""

    def __init__(self, order: Order) -> None:
        self.order = order
        isolation = Isolation(order.isolation) if order.isolation else None
        self._subject = Subject(order.spec, order.slots, order.deadline_s, isolation=isolation, seed=order.seed)

    def __enter__(self) -> Grader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._subject.close()

    def inspect(self) -> dict[str, Any]:
        """What the submission offers (`inspect_body`), and `error`: why it cannot be graded, or ""."""
        limit = min(self.order.deadline_s, IMPORT_DEADLINE_S)
        found: dict[str, Any] = {"error": ""}
        try:
            found |= _claims(self._subject.ask(inspect_body, 1)[0])
        except RankError as error:
            place = _place(error.traceback)
            said = error.message.removesuffix(place)  # a SyntaxError says it itself
            found["error"] = clipped(f"importing it raised {error.kind}: {said}{place}")
        except RankDied as error:
            found["error"] = clipped(f"importing it ended the process: {str(error).splitlines()[0]}")
        except DeadlineExceeded:
            found["error"] = f"importing it did not end within {limit:g} s"
        except (WireError, ServerLost) as error:
            found["error"] = clipped(f"importing it broke the rank: {str(error).splitlines()[0]}")
        return found

    def answer(self, group: Group) -> Iterator[Answer]:
        """The answers of one group, on fresh ranks."""
        self._subject.refresh()
        yield from answers(group, self._subject)


def _claims(answer: Any) -> dict[str, Any]:
    """What a rank said it found, each part of the type that it must have. WireError for anything else, which no rank of ours says."""
    if not isinstance(answer, dict) or answer.keys() != _CLAIMED.keys():
        raise WireError("what it says of the submission is no inspection of one")
    for name, kind in _CLAIMED.items():
        parts = answer[name].values() if isinstance(answer[name], dict) else answer[name]
        if not isinstance(answer[name], kind) or not all(isinstance(part, str) for part in parts):
            raise WireError(f"{name} of the submission is of a wrong type")
    return answer


def _place(traceback: str) -> str:
    """Where it was raised, of the submission's own lines the last; without the folder, which is of no machine but this one."""
    places = [m for m in _LINE.finditer(traceback) if not m["file"].startswith("<") and _OURS not in m["file"]]
    return f" ({Path(places[-1]['file']).name}, line {places[-1]['line']})" if places else ""


def broken(error: BaseException) -> str:
    """One line for an error that is ours to explain, not the submission's."""
    return clipped(f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}")
