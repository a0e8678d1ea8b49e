"""Why a world failed: from what its ranks reported, their exit codes, ledgers, stacks and output, to one exception.

Owns which failure is the first and which are consequences, and the words of the report.  Leaves ending ranks to `crew`.
"""

from __future__ import annotations

import os
import re
from typing import NamedTuple

from minigpt_dist.launch.crew import Crew
from minigpt_dist.launch.errors import DeadlineExceeded, LaunchError, RankDied, RankError, describe_exit, tells_of_loss
from minigpt_dist.launch.mirror import Call, read_mirror

__all__ = ["Failure", "deadline_error", "first_failure"]

_STACK_GRACE_S = 5.0  # a rank that does not write its stack by then will not
_STACK_BYTES = 1 << 16
_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+) in (?P<name>.+)$', re.MULTILINE)
_OURS = f"{os.sep}minigpt_dist{os.sep}launch{os.sep}"  # wherever it lies: a sandbox has it elsewhere


class Failure(NamedTuple):
    """What a rank reported of an exception; `at` is its monotonic clock, the same for all processes of a machine."""

    rank: int
    kind: str
    message: str
    traceback: str
    at: float

    @property
    def is_loss(self) -> bool:
        """Whether it only says that another rank is gone."""
        return tells_of_loss(self.message)


def first_failure(crew: Crew, dead: list[int], failures: list[Failure], starting: set[int]) -> LaunchError:
    """Choose the cause and describe it, the other ranks in one line each.  The crew must have ended.

    A rank that died alone (`dead`) comes before any exception: its peers' are about lost connections.  One that died in
    `starting` has printed where the server prints.
    """
    failures = sorted(failures, key=lambda failure: (failure.is_loss, failure.at))
    cause = dead[0] if dead else failures[0].rank
    details = [*_secondary(crew, cause, dead, failures), *_output(crew, cause)]
    if dead:
        last = [f"its last collective: {call}" for call in read_mirror(crew.file(cause, "ledger"))[1][-1:]]
        early = [f"it died as it started; last output:\n{crew.server_output()}"] if cause in starting else []
        return RankDied(cause, crew.codes[cause], [*early, *last, *details])
    first = failures[0]
    return RankError(cause, first.kind, first.message, first.traceback, details)


def _secondary(crew: Crew, cause: int, dead: list[int], failures: list[Failure]) -> list[str]:
    lines = [f"  rank {rank} died too: {describe_exit(crew.codes[rank])}" for rank in dead if rank != cause]
    for failure in failures:
        if failure.rank != cause:
            text = (failure.message.strip().splitlines() or [""])[0]
            lines.append(f"  rank {failure.rank} then raised {failure.kind}: {text[:200]}")
    told = {cause, *dead, *(failure.rank for failure in failures)}
    for rank in range(crew.world_size):
        call = _blocking_call(crew, rank)
        if rank not in told and call is not None:
            lines.append(f"  rank {rank} was stopped in {call.op} at {_short(call.site)}")
    return ["the other ranks:", *lines] if lines else []


def _output(crew: Crew, rank: int) -> list[str]:
    tail = crew.tail(rank)
    return [f"last output of rank {rank}:", *(f"  {line}" for line in tail.splitlines()[-20:])] if tail else []


def deadline_error(crew: Crew, deadline_s: float, returned: list[int]) -> DeadlineExceeded:
    """Look at every rank of a world whose time is up, end it, and say who waits for whom.

    `returned` are the ranks that have answered.  Ledgers are read first: asking for stacks ends the ranks.
    """
    ranks = list(range(crew.world_size))
    ledgers = {rank: read_mirror(crew.file(rank, "ledger")) for rank in ranks}
    blocked = {rank: call for rank in ranks if rank not in returned and (call := _blocking_call(crew, rank))}
    crew.ask_stacks(ranks, _STACK_GRACE_S)
    crew.kill()
    stacks = {rank: _stack(crew, rank) for rank in ranks}
    waiting = [(rank, call.op, call.site) for rank, call in blocked.items()]
    absent = [rank for rank in ranks if rank not in blocked]
    whereabouts = [f"{who} in {call.op} at {_short(call.site)} ({call.detail})" for who, call in _gathered(blocked)]
    whereabouts += [f"rank {rank} never came: it {_place(stacks[rank], rank in returned)}" for rank in absent]
    headline = f"deadline of {deadline_s:g} s passed: " + "; ".join(whereabouts)
    details: list[str] = []
    for rank in ranks:
        total, calls = ledgers[rank]
        details += [f"rank {rank}: {total} collectives" + (", the last of them:" if calls else "")]
        details += [f"  {_line(call)}" for call in calls[-5:]]
        shown = (line for line in stacks[rank].splitlines() if _OURS not in line and '"<string>"' not in line)
        details += [*(f"  {line}" for line in shown), *_output(crew, rank)]
    return DeadlineExceeded(headline, waiting, absent, stacks, details)


def _blocking_call(crew: Crew, rank: int) -> Call | None:
    """The newest call of a rank that it has not left."""
    _, calls = read_mirror(crew.file(rank, "ledger"))
    return next((call for call in reversed(calls) if call.blocks), None)


def _gathered(blocked: dict[int, Call]) -> list[tuple[str, Call]]:
    """The ranks that are in one and the same call, in words, with the call."""
    by_call: dict[Call, list[int]] = {}
    for rank, call in blocked.items():
        by_call.setdefault(call, []).append(rank)
    return [
        (f"rank {ranks[0]} waits" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} wait", call)
        for call, ranks in by_call.items()
    ]


def _line(call: Call) -> str:
    return str(call._replace(site=_short(call.site)))


def _stack(crew: Crew, rank: int) -> str:
    data = os.pread(crew.file(rank, "stack"), _STACK_BYTES, 0).decode(errors="replace").strip()
    return data or f"no stack: rank {rank} did not answer the signal ({describe_exit(crew.codes[rank])})"


def _place(stack: str, returned: bool) -> str:
    """Where the main thread, which is listed last, is outside torch and this package's launcher."""
    if returned:
        return "has returned its result"
    frames = list(_FRAME.finditer(stack.split("\n\n")[-1]))
    for frame in frames:
        file = frame["file"]
        if not file.startswith("<") and _OURS not in file and f"{os.sep}torch{os.sep}" not in file:
            return f"is in {frame['name']} at {_short(file)}:{frame['line']}"
    return "is not in any recorded place" if not frames else "is still starting or between jobs"


def _short(site: str) -> str:
    """A path below the current folder, relative to it."""
    here = os.getcwd() + os.sep
    return site.removeprefix(here)
