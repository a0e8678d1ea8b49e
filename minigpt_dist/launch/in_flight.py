"""When each recorded call was under way, and for how long it kept its caller: what overlap of communication and computation is seen by.

Owns the clock of calls. Off unless asked for: a callback a call costs time that a run without a reader need not spend.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

__all__ = ["blocked", "time_calls", "watch", "without_marks"]

_on = False


def time_calls(on: bool) -> None:
    """From now on, give every entry of the ledger three more keys, or none.

    `start` and `end`: when the call was made and when its exchange had ended on this rank, by time.perf_counter, one clock for all
    processes of a machine. `waits`: from when to when the caller was in it or waited for it. A work of which the backend does not tell
    the end (a send, a receive) ends when it has been waited for.
    """
    global _on
    _on = on


@contextlib.contextmanager
def blocked(entry: dict[str, Any]) -> Iterator[None]:
    """The caller is in this call, or waits for it."""
    if not _on:
        yield
        return
    began = time.perf_counter()
    entry.setdefault("start", began)
    try:
        yield
    finally:
        now = time.perf_counter()
        entry.setdefault("waits", []).append([began, now])
        if not entry.get("told"):
            entry["end"] = now


def without_marks(entry: dict[str, Any]) -> dict[str, Any]:
    """The entry without what only this module reads, in place."""
    entry.pop("told", None)
    return entry


def watch(entry: dict[str, Any], work: dist.Work) -> None:
    """Be told by the backend when `work` has ended, if it tells."""
    if not _on:
        return
    with contextlib.suppress(RuntimeError):  # sends and receives have no future
        future = work.get_future()
        entry["told"] = True
        future.then(lambda _: entry.update(end=time.perf_counter()))
