"""Ranks that do a piece of work at the same time and learn together whether it succeeded.

Every rank reports, also the one whose work raised; so all raise the same error or none does, and nobody is left
waiting. Reports are JSON.

Owns the rounds. Leaves how bytes reach the other ranks to the `exchange` it is given.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from minigpt_dist.checkpoint.errors import CheckpointError, mismatch

__all__ = ["Agreement", "Exchange"]

Exchange = Callable[[bytes], list[bytes]]  # this rank's bytes in, every rank's bytes out, by rank


class Agreement:
    """One rank's side. All ranks must call `run` the same number of times."""

    def __init__(self, rank: int, world_size: int, exchange: Exchange) -> None:
        self._rank, self._world_size, self._exchange = rank, world_size, exchange

    def run(self, doing: str, work: Callable[[], Any]) -> list[Any]:
        """Runs `work` here, and returns what it gave on every rank, as JSON, once it is known to have worked on all.

        Raises:
            CheckpointError: on all ranks if it failed on any, naming the first such rank and its cause.
        """
        report, failure = self._report(work)
        reports = [json.loads(reply) for reply in self._exchange(report)]
        ranks = [report["rank"] for report in reports]
        if ranks != list(range(self._world_size)):
            raise mismatch(doing, f"a report of each of {self._world_size} ranks", f"those of {ranks}") from failure
        for report in reports:
            if "failed" in report:
                line = " ".join(report["failed"].split())
                raise CheckpointError(f"{doing}: rank {report['rank']} failed first: {line}") from failure
        return [report["done"] for report in reports]

    def _report(self, work: Callable[[], Any]) -> tuple[bytes, Exception | None]:
        try:
            return json.dumps({"rank": self._rank, "done": work()}).encode(), None
        except Exception as error:
            cause = f"{type(error).__name__}: {error}"
            return json.dumps({"rank": self._rank, "failed": cause}).encode(), error
