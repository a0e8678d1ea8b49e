"""What can go wrong with a world of ranks, as exceptions.

Owns the exception types and the words of their messages.  Leaves finding out what happened to `autopsy`.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence

__all__ = [
    "DeadlineExceeded",
    "LaunchError",
    "RankDied",
    "RankError",
    "RanksLost",
    "ServerLost",
    "WireError",
    "describe_exit",
    "tells_of_loss",
]

# What gloo, the kernel and NCCL call the end of a peer.
_LOSSES = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "likely closed", "process exited")


def tells_of_loss(message: str) -> bool:
    """Whether an exception's text only says that another rank is gone."""
    return any(words in message for words in _LOSSES)


class LaunchError(RuntimeError):
    """A world could not be started, or did not end as it should.  Base class of all that `launch` raises on its own."""


class WireError(LaunchError):
    """A value is no plain data, is too large, or bytes received are no well-formed message."""


class ServerLost(LaunchError):  # noqa: N818 - as above
    """The process that makes ranks has ended, and they with it."""


class RankError(LaunchError):
    """The body raised on a rank.

    Attributes: `rank` the first rank that failed, `kind` the exception's class name, `message` its text,
    `traceback` the rank's formatted traceback.
    """

    def __init__(self, rank: int, kind: str, message: str, traceback: str, details: Sequence[str] = ()) -> None:
        self.rank, self.kind, self.message, self.traceback = rank, kind, message, traceback
        headline = f"rank {rank} raised {kind}: {message}"
        super().__init__("\n".join([headline, traceback.rstrip(), *details]))


class RankDied(LaunchError):  # noqa: N818 - what happened reads better than what it is
    """A rank ended without a report.

    Attributes: `rank`, and `exitcode`, the exit status, or minus the number of the signal that killed it.
    """

    def __init__(self, rank: int, exitcode: int, details: Sequence[str] = ()) -> None:
        self.rank, self.exitcode = rank, exitcode
        headline = f"rank {rank} died without a report: {describe_exit(exitcode)}"
        super().__init__("\n".join([headline, *details]))


class RanksLost(LaunchError):  # noqa: N818 - as above
    """A launcher's rank can reach others no more.

    Attributes: `rank`, which tells, and `lost`, the ranks that gave no answer; empty where all are there, or it is not known.
    """

    def __init__(self, rank: int, lost: Sequence[int], cause: str) -> None:
        self.rank, self.lost = rank, list(lost)
        who = (
            f"rank{'s' if len(lost) > 1 else ''} {', '.join(map(str, lost))}"
            if lost
            else "the connection to the others"
        )
        super().__init__(
            f"rank {rank} has lost {who}: {cause.strip().splitlines()[0] if cause.strip() else 'no answer'}"
        )


class DeadlineExceeded(LaunchError):  # noqa: N818 - as above
    """Not every rank answered in time.

    Attributes: `waiting` holds (rank, call, "file:line") for every rank that is inside a communication call, `absent`
    the ranks that are not (busy elsewhere, or returned already), `stacks` the Python stacks of every rank, by rank.
    """

    def __init__(
        self,
        headline: str,
        waiting: Sequence[tuple[int, str, str]],
        absent: Sequence[int],
        stacks: dict[int, str],
        details: Sequence[str] = (),
    ) -> None:
        self.waiting, self.absent, self.stacks = list(waiting), list(absent), dict(stacks)
        super().__init__("\n".join([headline, *details]))


def describe_exit(exitcode: int) -> str:
    """Say what an exit code means: `killed by SIGKILL`, `exit status 3`."""
    if exitcode >= 0:
        return f"exit status {exitcode}"
    try:
        return f"killed by {signal.Signals(-exitcode).name}"
    except ValueError:
        return f"killed by signal {-exitcode}"
