"""Worlds: run a function on every rank of a fresh process group, and get back what each returned.

Owns the life of a world and of each job on it: start, deadline, results in rank order, and an end in every case.
Leaves processes to `crew`, and explaining failures to `autopsy`.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeVar

from minigpt_dist.launch.arguments import pack
from minigpt_dist.launch.autopsy import Failure, deadline_error, first_failure
from minigpt_dist.launch.client import Method, ServerHandle
from minigpt_dist.launch.crew import START_S, Crew, Event
from minigpt_dist.launch.errors import LaunchError, WireError
from minigpt_dist.launch.frames import Frame
from minigpt_dist.launch.reference import refer
from minigpt_dist.launch.wire import decode

__all__ = ["World", "run_world"]

T = TypeVar("T")
_CAUSE_S = 5.0  # from a lost connection to the news of the end that caused it, on a machine with more to do


def run_world(
    body: Callable[..., T],
    world_size: int,
    *args: Any,
    deadline_s: float = 60.0,
    folder: str | os.PathLike[str] | None = None,
    backend: str = "gloo",
    env: Mapping[str, str] | None = None,
    method: Method | None = None,
    server: ServerHandle | None = None,
) -> list[T]:
    """Run `body(*args)` on `world_size` fresh ranks and return what each returned, in rank order.

    Arguments and errors are those of `World` and `World.run`.
    """
    world = World(
        world_size, deadline_s=deadline_s, backend=backend, env=env, method=method, folder=folder, server=server
    )
    with world:
        return world.run(body, *args)


class World:
    """`world_size` ranks, each a process of one thread inside one initialised `torch.distributed` group.

    The ranks start with the first `run` and stay for the next; after a job that failed in any way they are ended, and
    the next `run` starts fresh ones.  Use as a context manager, or call `close`.

    Args:
        world_size: number of ranks, at least 1.
        deadline_s: seconds a job may take, counted from when all ranks have started.
        backend: name of the process-group back end.
        env: variables set in every rank, over the parent's.  What a library reads as it loads needs method="spawn".
        method: "fork" (from a clean process that has imported torch; the default on Linux) or "spawn".
        folder: where the ranks' output and ledgers go and stay; by default a temporary folder, removed in the end.
        server: a rank server of the caller's, in a sandbox; by default this process's own.

    Raises ValueError for bad arguments, LaunchError on Windows.
    """

    def __init__(
        self,
        world_size: int,
        *,
        deadline_s: float = 60.0,
        backend: str = "gloo",
        env: Mapping[str, str] | None = None,
        method: Method | None = None,
        folder: str | os.PathLike[str] | None = None,
        server: ServerHandle | None = None,
    ) -> None:
        if type(world_size) is not int or world_size < 1:
            raise ValueError(f"world_size is {world_size!r}, expected an int of at least 1")
        self.world_size, self.deadline_s = world_size, _checked_deadline(deadline_s)
        self._method, self._server = _checked_method(method), server
        self._backend, self._env = backend, dict(env or {})
        for name, value in self._env.items():
            if not isinstance(name, str) or not isinstance(value, str):
                raise ValueError(f"env holds {name!r}: {value!r}, expected str: str")
        self._folder = None if folder is None else Path(folder)
        if self._folder is not None and self._folder.exists() and not self._folder.is_dir():
            raise ValueError(f"folder is {str(folder)!r}, which is not a directory")
        self._crew: Crew | None = None
        self._jobs = 0

    def __enter__(self) -> World:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(self, body: Callable[..., T], *args: Any, deadline_s: float | None = None) -> list[T]:
        """Run `body(*args)` on every rank and return what each returned, in rank order.

        Args:
            body: a function at the top level of a module; it finds its place by `torch.distributed.get_rank()`.
            args: anything pickle can take to the ranks.
            deadline_s: seconds for this job, in place of the world's.

        Results come back as plain data and CPU tensors (see `wire`), never through pickle.
        Raises ValueError for bad arguments, RankError where the body raises or returns something else, RankDied where a
        rank ends, DeadlineExceeded where ranks do not answer in time, LaunchError where the world itself fails.
        """
        limit_s = self.deadline_s if deadline_s is None else _checked_deadline(deadline_s)
        reference, packed = refer(body), pack(args)
        if self._server is not None and self._server.jail is not None:
            reference = reference._replace(file=None)  # a sandbox has the module elsewhere
        self._jobs += 1
        header = json.dumps({"job": self._jobs, "body": reference}).encode("ascii")
        try:
            crew, starting = self._ready_crew()
            for rank in range(self.world_size):
                crew.send(rank, header, packed, START_S if starting else limit_s)
            return _Job(crew, self._jobs, limit_s, starting).results()
        except BaseException:
            self.close()
            raise

    def count(self, what: Literal["traffic", "held"]) -> int | None:
        """Bytes that the loopback of the ranks' sandbox has carried, or that it holds in memory; None without one, or without ranks."""
        return self._crew.count(what) if self._crew is not None and self._crew.usable else None

    def close(self) -> None:
        """End the ranks and wait for them.  The world can be run again: that starts fresh ones."""
        crew, self._crew = self._crew, None
        if crew is not None:
            crew.close()

    def _ready_crew(self) -> tuple[Crew, bool]:
        if self._crew is not None and self._crew.usable:
            return self._crew, False
        self._crew = Crew(self.world_size, self._method, self._backend, self._env, self._folder, self._server)
        return self._crew, True


class _Job:
    """One body on all ranks of a crew, from its dispatch to its results."""

    def __init__(self, crew: Crew, number: int, deadline_s: float, starting: bool) -> None:
        self._crew, self._number, self._deadline_s = crew, number, deadline_s
        self._starting = set(range(crew.world_size)) if starting else set()
        self._limit = time.monotonic() + (START_S if starting else deadline_s)
        self._results: dict[int, Any] = {}
        self._failures: list[Failure] = []
        self._dead: list[int] = []

    def results(self) -> list[Any]:
        while len(self._results) < self._crew.world_size:
            self._take(self._crew.events(self._limit - time.monotonic()))
            if self._dead or self._failures:
                raise self._failed()
            if time.monotonic() >= self._limit and len(self._results) < self._crew.world_size:
                if self._starting:
                    late, output = sorted(self._starting), self._crew.server_output()
                    raise LaunchError(f"ranks {late} have not started within {START_S:g} s; last output:\n{output}")
                raise deadline_error(self._crew, self._deadline_s, sorted(self._results))
        return [self._results[rank] for rank in range(self._crew.world_size)]

    def _take(self, events: list[Event]) -> None:
        for event in events:
            if event.frame is not None:
                self._take_frame(event.rank, event.frame)
            elif event.kind == "garbage":
                raise WireError(f"rank {event.rank} sent what is no message: {event.text}")
            elif event.rank not in self._dead and not any(failure.rank == event.rank for failure in self._failures):
                self._dead.append(event.rank)

    def _take_frame(self, rank: int, frame: Frame) -> None:
        line, _, header = frame.header.partition(b"\n")
        try:
            if line == b"hello 0" and rank in self._starting:
                self._starting.discard(rank)
                if not self._starting:
                    self._limit = time.monotonic() + self._deadline_s
            elif line == b"result %d" % self._number and rank not in self._results:
                self._results[rank] = decode(header, frame.body)
            elif line == b"failure %d" % self._number:
                self._failures.append(_failure(rank, decode(header, frame.body)))
            else:
                raise WireError(f"its first line is {line[:80]!r}")
        except WireError as error:
            raise WireError(f"rank {rank} sent what is no answer to job {self._number}: {error}") from None

    def _failed(self) -> LaunchError:
        """End the ranks and name the first failure.

        A rank that dies is heard of by its peers, and their reports may arrive before the news of its end: so where all
        that is known is lost connections, their cause is waited for.  Ends after our kill are only ends.
        """
        limit = time.monotonic() + _CAUSE_S
        while not self._dead and all(failure.is_loss for failure in self._failures) and time.monotonic() < limit:
            self._take(self._crew.events(limit - time.monotonic()))
        for event in self._crew.kill():
            if event.frame is not None and event.frame.header.startswith(b"failure"):
                self._take_frame(event.rank, event.frame)
        return first_failure(self._crew, self._dead, self._failures, self._starting)


def _failure(rank: int, report: Any) -> Failure:
    if not isinstance(report, dict) or set(report) != {"kind", "message", "traceback", "at"}:
        raise WireError("it is no report of a failure")
    kind, message, trace, at = report["kind"], report["message"], report["traceback"], report["at"]
    if not all(isinstance(text, str) for text in (kind, message, trace)) or not isinstance(at, float):
        raise WireError("its report of a failure holds a wrong type")
    return Failure(rank, kind, message, trace, at)


def _checked_deadline(deadline_s: float) -> float:
    if isinstance(deadline_s, bool) or not isinstance(deadline_s, (int, float)) or not 0 < deadline_s < math.inf:
        raise ValueError(f"deadline_s is {deadline_s!r}, expected a positive, finite number of seconds")
    return float(deadline_s)


def _checked_method(method: Method | None) -> Method:
    if sys.platform == "win32":
        raise LaunchError("worlds need Unix sockets and signals: Linux or macOS, not Windows")
    if method is None:
        return "fork" if sys.platform == "linux" else "spawn"
    if method not in ("fork", "spawn"):
        raise ValueError(f"method is {method!r}, expected 'fork' or 'spawn'")
    if method == "fork" and sys.platform != "linux":
        raise ValueError(f"method is 'fork', which is not safe on {sys.platform}: expected 'spawn'")
    return method
