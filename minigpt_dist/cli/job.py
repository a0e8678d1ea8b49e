"""Ranks for a command: ours, each run on fresh processes, or those of a launcher, of which this process is one.

Owns the one interface, so that a command reads the same under `torchrun`: there every rank carries out the whole
command, bodies run in place, and results are exchanged, so that all come to the same verdict; only the leader prints
and writes.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from minigpt_dist.cli.usage import UsageError
from minigpt_dist.launch import RankError, attach_elastic, choose_backend, choose_device, run_world
from minigpt_dist.launch.errors import tells_of_loss
from minigpt_dist.launch.wire import decode, encode
from minigpt_dist.parallel.collectives import exchange


class Job(Protocol):
    """`world_size` ranks on `device`. `leader`: is this the process that prints and writes?"""

    world_size: int
    device: str
    backend: str

    @property
    def leader(self) -> bool: ...

    def run(self, body: Callable[..., Any], *args: Any) -> list[Any]:
        """Run `body`, with the leader's arguments, on every rank; what each returned. LaunchError if one fails."""
        ...

    def agreed(self, make: Callable[[], Any]) -> Any:
        """The plain data that `make()` gives on the leader, which alone calls it; what it raises, all raise."""
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

    def agreed(self, make: Callable[[], Any]) -> Any:
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
        shared = share(args)[0]
        mine = _outcome(lambda: body(*shared))
        # Said at once: others may wait in a call that this rank will not make, and never hear of it. A lost peer is named below.
        if mine[0] is not None and not tells_of_loss(mine[0][1]):
            print(f"rank {self.rank} raised\n{mine[0][2]}", file=sys.stderr, flush=True)
        outcomes = share(mine)
        for rank, (failure, _) in enumerate(outcomes):
            if failure is not None:
                raise RankError(rank, *failure)
        return [value for _, value in outcomes]

    def agreed(self, make: Callable[[], Any]) -> Any:
        failure, value = share(_outcome(make) if self.leader else (None, None))[0]
        if failure is not None:
            kind, message, trace = failure
            raise UsageError(message) if kind == UsageError.__name__ else RankError(0, kind, message, trace)
        return value


def _outcome(make: Callable[[], Any]) -> tuple[list[str] | None, Any]:
    """([kind, message, traceback], None) of what `make` raises, or (None, its value)."""
    try:
        return None, make()
    except Exception as error:  # whatever it is, the other ranks must hear of it rather than wait
        return [type(error).__name__, str(error), traceback.format_exc()], None


def share(value: Any) -> list[Any]:
    """Every rank's plain `value`, in rank order, on every rank."""
    header, blobs = encode(value)
    parts = exchange(b"".join([len(header).to_bytes(8, "big"), header, *blobs]))
    return [decode(part[8 : 8 + (size := int.from_bytes(part[:8], "big"))], part[8 + size :]) for part in parts]


@contextmanager
def open_job(
    launched: bool, world_size: int, device: str = "auto", backend: str | None = None, deadline_s: float = 60.0
) -> Iterator[Job]:
    """Ranks for a command, for the length of the block.

    UsageError if the device is not there, RanksLost for a launcher's ranks that cannot reach each other.
    """
    rank = int(os.environ["RANK"]) if launched else world_size - 1  # whoever starts them all asks for the last one
    try:
        chosen = choose_device(device, rank)
    except ValueError as error:
        raise UsageError(str(error)) from error
    backend = backend or choose_backend(chosen)
    if not launched:
        yield OwnRanks(world_size, chosen.partition(":")[0], backend, deadline_s)
        return
    _freeze_imports()
    with attach_elastic(backend, chosen, timeout_s=deadline_s) as (rank, size):
        yield LaunchedRanks(size, rank, chosen, backend)


def _freeze_imports() -> None:
    """Hide what imports made from the garbage collector, as the rank server does: a census walks all the rest."""
    importlib.import_module("torch._dynamo")  # an optimizer imports it at its first call
    gc.collect()
    gc.freeze()
