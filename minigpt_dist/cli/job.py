"""Ranks for a command: ours, each run on fresh processes, or those of a launcher, of which this process is one.

Owns the one interface, so that a command reads the same under `torchrun`: there every rank carries out the whole command, the
bodies run in place, and results are exchanged, so that all come to the same verdict; only the leader prints and writes.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from minigpt_dist.cli.usage import UsageError
from minigpt_dist.launch import RankError, attach_elastic, choose_backend, choose_device, run_world
from minigpt_dist.launch.wire import decode, encode
from minigpt_dist.parallel.collectives import exchange


class Job(Protocol):
    """`world_size` ranks on `device`. `leader`: is this the process that prints and writes?"""

    world_size: int
    device: str
    backend: str
    leader: bool

    def run(self, body: Callable[..., Any], *args: Any) -> list[Any]:
        """Run `body(*args)`, with the leader's arguments, on every rank; what each returned. LaunchError if one fails."""
        ...

    def agreed(self, make: Callable[[], str | None]) -> str | None:
        """What `make()` gives on the leader, which alone calls it; the UsageError it raises is raised by all."""
        ...


@dataclass
class OwnRanks:
    """Ranks that this process starts, new ones for each run."""

    world_size: int
    device: str
    backend: str
    deadline_s: float
    leader: bool = True

    def run(self, body: Callable[..., Any], *args: Any) -> list[Any]:
        return run_world(body, self.world_size, *args, deadline_s=self.deadline_s, backend=self.backend)

    def agreed(self, make: Callable[[], str | None]) -> str | None:
        return make()


@dataclass
class LaunchedRanks:
    """The ranks of a launcher's job; this process is one of them, inside its process group."""

    world_size: int
    rank: int
    device: str
    backend: str

    @property
    def leader(self) -> bool:
        return self.rank == 0

    def run(self, body: Callable[..., Any], *args: Any) -> list[Any]:
        try:
            return share(body(*share(args)[0]))
        except Exception as error:  # whatever a body or a broken connection raises ends the job in a named error
            raise RankError(self.rank, type(error).__name__, str(error), traceback.format_exc()) from None

    def agreed(self, make: Callable[[], str | None]) -> str | None:
        outcome: tuple[str | None, str | None] = (None, None)
        if self.leader:
            try:
                outcome = (make(), None)
            except UsageError as error:
                outcome = (None, str(error))
        value, wrong = share(outcome)[0]
        if wrong is not None:
            raise UsageError(wrong)
        return value  # type: ignore[no-any-return]  # decoded from what `make` gave


def share(value: Any) -> list[Any]:
    """Every rank's plain `value`, in rank order, on every rank."""
    header, blobs = encode(value)
    parts = exchange(b"".join([len(header).to_bytes(8, "big"), header, *blobs]))
    return [decode(part[8 : 8 + (size := int.from_bytes(part[:8], "big"))], part[8 + size :]) for part in parts]


@contextmanager
def open_job(
    launched: bool, world_size: int, device: str = "auto", backend: str | None = None, deadline_s: float = 60.0
) -> Iterator[Job]:
    """Ranks for a command, for the length of the block. UsageError if the device is not there."""
    rank = int(os.environ["RANK"]) if launched else world_size - 1  # whoever starts them all asks for the last one
    try:
        chosen = choose_device(device, rank)
    except ValueError as error:
        raise UsageError(str(error)) from error
    backend = backend or choose_backend(chosen)
    if not launched:
        yield OwnRanks(world_size, chosen.partition(":")[0], backend, deadline_s)
        return
    with attach_elastic(backend, chosen, timeout_s=deadline_s) as (rank, size):
        yield LaunchedRanks(size, rank, chosen, backend)
