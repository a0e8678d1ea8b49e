"""The subject of a judgement: one implementation, and the evidence gathered from it so far.

Owns running bodies on ranks for the judge and remembering what they returned, so that many checks share one run. Leaves what
the evidence means to `checks/`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from minigpt_dist.launch import DeadlineExceeded, LaunchError, World, run_world
from minigpt_dist.verify.contract import OURS
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

    A context manager: leaving it ends the ranks kept alive for short questions.
    """

    spec: str = OURS
    slots: tuple[str, ...] = ()
    deadline_s: float = DEADLINE_S
    _evidence: dict[Any, Any] = field(default_factory=dict, repr=False)
    _stuck: int = 0
    _worlds: dict[int, World] = field(default_factory=dict, repr=False)

    def __enter__(self) -> Subject:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End every rank kept for this subject."""
        while self._worlds:
            self._worlds.popitem()[1].close()

    @property
    def ours(self) -> bool:
        """Is this the package itself? Then correct means bit for bit."""
        return self.spec == OURS

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

    def ask(self, body: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
        """`body(spec, slots, *args)` on ranks kept alive between questions (a few milliseconds); new ones after a failure."""
        if world_size not in self._worlds:
            self._worlds[world_size] = World(world_size, deadline_s=min(self.deadline_s, QUESTION_DEADLINE_S))
        return self._within_patience(lambda: self._worlds[world_size].run(body, self.spec, list(self.slots), *args))

    def run(self, body: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
        """`body(spec, slots, *args)` on `world_size` fresh processes."""
        return self._within_patience(
            lambda: run_world(body, world_size, self.spec, list(self.slots), *args, deadline_s=self.deadline_s)
        )

    def _within_patience(self, attempt: Callable[[], list[Any]]) -> list[Any]:
        """Run `attempt`, unless so many runs got stuck already that more of them would only cost a deadline each."""
        if self._stuck >= PATIENCE:
            raise LaunchError(f"not run, because {PATIENCE} earlier runs of this implementation got stuck")
        try:
            return attempt()
        except DeadlineExceeded:
            self._stuck += 1
            raise
