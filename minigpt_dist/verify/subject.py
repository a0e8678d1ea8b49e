"""The subject of a judgement: one implementation, and the evidence gathered from it so far.

Owns running bodies on ranks for the judge, in a sandbox where one is asked for, and remembering what they returned, so that many
checks share one run. Leaves what the evidence means to `checks/`, and what a sandbox is to `launch/sandbox/`.
"""

from __future__ import annotations

import hashlib
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from minigpt_dist.launch import DeadlineExceeded, LaunchError, World, run_world
from minigpt_dist.launch.client import ServerHandle
from minigpt_dist.launch.sandbox import Contents, Isolation, Jail
from minigpt_dist.verify.contract import BY_SHAPE, OURS, slots_body
from minigpt_dist.verify.kit import PRELOAD, beside, kit
from minigpt_dist.verify.peers import Traits, traits_of

DEADLINE_S = 60.0
QUESTION_DEADLINE_S = (
    30.0  # for one short question: 0.05 s seen idle, 3 s with five times as many busy processes as cores
)
PATIENCE = 4  # stuck runs after which an implementation is not run any more


class NotJudged(Exception):  # noqa: N818  # an outcome beside passed and failed, not an error
    """A check cannot be put to this implementation: neither pass nor fail. The message says why."""


@dataclass
class Subject:
    """An implementation under judgement. `slots` restricts which of its pieces are taken (the rest are ours).

    isolation: the mode of the sandbox that its ranks run in; None for this process's own rank server, and no sandbox.
    seed: a secret from which data, weights and scenarios are drawn; None for the same ones each time.
    budget_s: seconds that all its runs together may take; what comes after is not run.
    A context manager: leaving it ends the ranks kept alive for short questions, and the sandboxes.
    """

    spec: str = OURS
    slots: tuple[str, ...] = ()
    deadline_s: float = DEADLINE_S
    isolation: Isolation | None = None
    seed: int | None = None
    budget_s: float | None = None
    _evidence: dict[Any, Any] = field(default_factory=dict, repr=False)
    _stuck: int = 0
    _spent_s: float = 0.0
    _areas: int = 0
    _worlds: dict[int, World] = field(default_factory=dict, repr=False)
    _filled: tuple[str, ...] | None = None
    _hopeless: DeadlineExceeded | None = field(default=None, repr=False)
    _server: ServerHandle | None = field(default=None, repr=False)

    def __enter__(self) -> Subject:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End every rank kept for this subject."""
        while self._worlds:
            self._worlds.popitem()[1].close()
        server, self._server = self._server, None
        if server is not None:
            server.close()

    def refresh(self) -> None:
        """End the ranks kept alive and forget how many runs got stuck: what is asked next depends on nothing asked before.

        The sandbox and what was learned stay.
        """
        while self._worlds:
            self._worlds.popitem()[1].close()
        self._stuck = 0

    def draw(self, what: str) -> int:
        """A number below 2^31 that only the seed's owner can tell, for the choice called `what`; 0 without a seed."""
        if self.seed is None:
            return 0
        return int.from_bytes(hashlib.sha256(f"{self.seed}:{what}".encode()).digest()[:4], "big") >> 1

    @property
    def ours(self) -> bool:
        """Is this the package itself? Then correct means bit for bit."""
        return self.spec == OURS

    @property
    def walled(self) -> bool:
        """Has each of its sandboxes files, processes and a network of its own?"""
        return self.isolation is not None and self.isolation.name in ("namespaces", "bwrap")

    @property
    def notes(self) -> tuple[str, ...]:
        """What the isolation in force gives, and which pieces of the reference its sandboxes hold, if any."""
        if self.isolation is None:
            return ()
        held = ("all of this package",) if self._path() is None else beside(self._filled or self.slots)
        return (*self.isolation.notes, *([f"files: also {', '.join(held)}"] if held else ()))

    def lacks(self, slots: tuple[str, ...]) -> bool:
        """Would a question about these pieces be put to none of the submission's own? Known in a sandbox, where it was settled."""
        filled = self._filled or self.slots
        return bool(self.isolation is not None and filled and not set(filled) & set(slots))

    @property
    def traits(self) -> Traits | None:
        """What a peer (`peer:NAME`) is by design; None for any other implementation."""
        return traits_of(self.spec)

    def evidence(self, key: tuple[Any, ...], gather: Callable[[], Any]) -> Any:
        """What `gather()` returned the first time for `key`; an exception is remembered and raised again."""
        if key not in self._evidence:
            try:
                self._evidence[key] = (gather(), None)
            except Exception as error:
                self._evidence[key] = (None, error)
        value, failure = self._evidence[key]
        if failure is not None:
            raise failure
        return value

    def ask(self, body: Callable[..., Any], world_size: int, *args: Any, deadline_s: float | None = None) -> list[Any]:
        """`body(spec, slots, *args)` on ranks kept alive between questions (a few milliseconds); new ones after a failure.

        deadline_s: for this question, where less than for others will do.
        """

        def attempt() -> list[Any]:
            told = self._told()  # first: where the sandbox has died, this starts another, in which the world is to be
            world = self._world(world_size)
            return world.run(body, *told, *args, deadline_s=min(world.deadline_s, deadline_s or world.deadline_s))

        return self._within_patience(attempt)

    def traffic(self, world_size: int) -> int | None:
        """Bytes that the sandbox's loopback has carried, as told from outside the ranks; None where it has none of its own."""
        return self._world(world_size).count("traffic")

    def held(self, world_size: int) -> int | None:
        """Bytes that everything in the sandbox holds in memory, as told from outside the ranks; None where it has no walls."""
        return self._world(world_size).count("held")

    def run(self, body: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
        """`body(spec, slots, *args)` on `world_size` fresh processes."""
        return self._within_patience(lambda: self._run(self._own_server(), body, world_size, args))

    def run_afresh(self, body: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
        """As `run`, but in a sandbox of its own, in which nothing is left of what ran before."""
        if self.isolation is None or self.isolation.name == "none":
            return self.run(body, world_size, *args)

        def attempt() -> list[Any]:
            self._own_server()
            server = self._new_server()
            try:
                return self._run(server, body, world_size, args)
            finally:
                if server is not None:
                    server.close()

        return self._within_patience(attempt)

    @contextmanager
    def area(self) -> Iterator[str]:
        """The path, as ranks see it, of a folder for them to make, and to remove when they are done; gone afterwards in any case."""
        if self.isolation is not None and self.isolation.name != "none":
            self._areas += 1
            yield f"{_server_scratch(self._own_server())}/area-{self._areas}"
            return
        with tempfile.TemporaryDirectory(prefix="minigpt-dist-", ignore_cleanup_errors=True) as folder:
            yield str(Path(folder) / "area")

    def _world(self, world_size: int) -> World:
        if world_size not in self._worlds:
            limit_s = min(self.deadline_s, QUESTION_DEADLINE_S)
            self._worlds[world_size] = World(world_size, deadline_s=limit_s, server=self._own_server())
        return self._worlds[world_size]

    def _run(self, server: ServerHandle | None, body: Callable[..., Any], world_size: int, args: Any) -> list[Any]:
        return run_world(body, world_size, *self._told(server), *args, deadline_s=self.deadline_s, server=server)

    def _own_server(self) -> ServerHandle | None:
        """The rank server in this subject's sandbox, a new one if the old one has died; None without isolation."""
        if self._server is not None and self._server.ended:
            self.close()
        if self._server is None:
            self._server = self._new_server()
        return self._server

    def _new_server(self) -> ServerHandle | None:
        """A rank server in a fresh sandbox; None without isolation. The first one also settles which pieces the submission fills."""
        if self.isolation is None:
            return None
        if self._hopeless is not None:
            raise self._hopeless
        if self._filled is not None:
            return self._start_server(self.isolation)
        self._filled = self.slots
        server = self._start_server(self.isolation)
        if self.slots or self._path() is None:
            return server
        self._filled = self._asked_slots(server)
        if not self._filled:
            return server
        server.close()
        return self._start_server(self.isolation)

    def _start_server(self, isolation: Isolation) -> ServerHandle:
        return ServerHandle("fork", Jail(isolation, self._contents()))

    def _contents(self) -> Contents:
        """The kit, the submission, and the pieces of ours that stand beside its own; the whole package for a part of the package."""
        path = self._path()
        if path is None:
            return Contents(None, None, (*PRELOAD, "minigpt_dist.worker"))
        return Contents(kit(), path, PRELOAD, beside(self._filled or ()))

    def _asked_slots(self, server: ServerHandle) -> tuple[str, ...]:
        """The pieces that a submission of torch's shape has, asked before anything else, so that no sandbox holds these of ours."""
        try:
            answer = self._run(server, slots_body, 1, ())[0]
        except DeadlineExceeded as error:  # so would every other run
            server.close()
            self._filled, self._hopeless = None, error
            raise
        except LaunchError:  # whoever asks next will be told why
            return ()
        return tuple(slot for slot in BY_SHAPE if isinstance(answer, list) and slot in answer)

    def _path(self) -> Path | None:
        """Where a submission lies; None for a module, a fault or a peer."""
        path = Path(self.spec)
        if self.ours or self.spec.startswith(("fault:", "variant:", "peer:")):
            return None
        return path if path.suffix == ".py" or "/" in self.spec or path.is_dir() else None

    def _told(self, server: ServerHandle | None = None) -> tuple[str, list[str]]:
        """Spec and slots, as ranks are told them. In a sandbox the slots are settled: what a submission fills is asked once."""
        server = server or self._own_server()
        jail = server.jail if server is not None else None
        spec = str(jail.submission) if jail is not None and jail.submission is not None else self.spec
        return spec, list(self._filled or self.slots)

    def _within_patience(self, attempt: Callable[[], list[Any]]) -> list[Any]:
        """Run `attempt`, unless so many runs got stuck, or all of them took so long, that more would only cost time."""
        if self._stuck >= PATIENCE:
            raise LaunchError(f"not run, because {PATIENCE} earlier runs of this implementation got stuck")
        if self.budget_s is not None and self._spent_s >= self.budget_s:
            raise LaunchError(f"not run, because earlier runs of this implementation took its {self.budget_s:g} s")
        started = time.monotonic()
        try:
            return attempt()
        except DeadlineExceeded:
            self._stuck += 1
            raise
        finally:
            self._spent_s += time.monotonic() - started


def _server_scratch(server: ServerHandle | None) -> str:
    assert server is not None
    assert server.jail is not None
    return server.jail.scratch
