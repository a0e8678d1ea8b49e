"""The ledger of collectives: what this process asked of `torch.distributed`, in order.

Owns the wrapping of the public communication functions, from outside, so that any implementation is recorded without
its help.  A call made by another recorded call is a part of it, not counted.
Leaves what an entry says to `entry`.  What C++ sends on its own (DistributedDataParallel's buckets, functional
collectives) is not seen: no Python function shows it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from minigpt_dist.launch import in_flight, mirror
from minigpt_dist.launch.entry import PAYLOAD, detail, entry_of, site
from minigpt_dist.launch.mirror import Mirror

__all__ = ["attach", "clear", "entries", "install", "seconds"]


@dataclass
class _Open:
    """An asynchronous call of which `works` pieces of work have not been seen to end."""

    index: int
    entry: dict[str, Any]
    works: int

    def end_one(self) -> None:
        self.works -= 1
        self.entry["done"] = self.works == 0
        if self.works == 0:
            _mark(self.index, mirror.DONE)


_entries: list[dict[str, Any]] = []
_count = itertools.count()
_mirror: Mirror | None = None
_inside = threading.local()
_pending: weakref.WeakKeyDictionary[Any, _Open] = weakref.WeakKeyDictionary()


def install() -> None:
    """Wrap the communication functions of `torch.distributed`, once; later calls change nothing.

    What was imported by name before (`from torch.distributed import all_reduce`) stays unrecorded: call this first.
    """
    for op, payload in PAYLOAD.items():
        original = getattr(c10d, op, None)
        if original is None or hasattr(original, "_ledger"):
            continue
        wrapped = _recorded(op, original, payload)
        for module in (c10d, dist):
            if hasattr(module, op):
                setattr(module, op, wrapped)
    if not hasattr(dist.Work.wait, "_ledger"):
        dist.Work.wait = _recorded_wait(dist.Work.wait)  # type: ignore[method-assign]  # seen from outside, as above


def attach(path: Path) -> None:
    """Repeat every entry into the file at `path`, made by `mirror.create_mirror`."""
    global _mirror
    _mirror = Mirror(path)


def entries() -> list[dict[str, Any]]:
    """Return what was recorded since the last `clear`, oldest first, as plain data.

    Keys: `op`; `group`, its global ranks; `dtype`, `numel` and `bytes` of the payload (None, 0, 0 without tensors),
    which is what this rank brings (of a batch: what it sends), or receives where it only receives; `site`, the calling
    "file:line"; `peer`, the rank named as source or destination, or None; `done`, whether the call has ended well (an
    asynchronous one: its work has). While calls are timed, also what `in_flight.py` adds.
    """
    for work in [work for work in _pending if work.is_completed()]:
        _pending.pop(work).end_one()
    return [in_flight.without_marks(dict(entry, group=list(entry["group"]))) for entry in _entries]


def seconds() -> float:
    """How long this thread has been in recorded calls and in waits for them since the last `clear`."""
    return float(getattr(_inside, "seconds", 0.0))


@contextlib.contextmanager
def _timed() -> Iterator[None]:
    began = time.perf_counter()
    try:
        yield
    finally:
        _inside.seconds = seconds() + time.perf_counter() - began


def clear() -> None:
    """Forget all entries, here and in the attached file, and the time they took."""
    global _count
    _inside.seconds = 0.0
    _entries.clear()
    _pending.clear()
    _count = itertools.count()
    if _mirror is not None:
        _mirror.clear()


def _recorded(op: str, original: Callable[..., Any], payload: str | None) -> Callable[..., Any]:
    names = list(inspect.signature(original).parameters)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if getattr(_inside, "call", False):
            return original(*args, **kwargs)
        given = dict(zip(names, args, strict=False), **kwargs)
        entry = entry_of(op, given, given.get(payload) if payload else None)
        index = _note(entry)
        _inside.call = True
        try:
            with _timed(), in_flight.blocked(entry):
                result = original(*args, **kwargs)
        except BaseException:
            _mark(index, mirror.FAILED)
            raise
        finally:
            _inside.call = False
        _settle(index, entry, result)
        return result

    call._ledger = True  # type: ignore[attr-defined]  # marks the function as wrapped
    return call


def _recorded_wait(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
        call = _pending.get(work)
        if call is None:
            return original(work, *args, **kwargs)
        if _mirror is not None:
            _mirror.wait(f"{call.entry['op']}'s wait", site(), detail(call.entry))
        try:
            with _timed(), in_flight.blocked(call.entry):
                result = original(work, *args, **kwargs)
        finally:
            if _mirror is not None:
                _mirror.waited()
        if _pending.pop(work, None) is call:
            call.end_one()
        return result

    wait._ledger = True  # type: ignore[attr-defined]  # marks the method as wrapped
    return wait


def _note(entry: dict[str, Any]) -> int:
    index = next(_count)
    _entries.append(entry)
    if _mirror is not None:
        _mirror.write(index, entry["op"], entry["site"], detail(entry))
    return index


def _settle(index: int, entry: dict[str, Any], result: Any) -> None:
    works = [work for work in (result if isinstance(result, list) else [result]) if isinstance(work, dist.Work)]
    call = _Open(index, entry, len(works))
    for work in works:
        _pending[work] = call
        in_flight.watch(entry, work)
    entry["done"] = not works
    _mark(index, mirror.PENDING if works else mirror.DONE)


def _mark(index: int, state: bytes) -> None:
    if _mirror is not None:
        _mirror.mark(index, state)
