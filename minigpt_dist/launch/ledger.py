"""The ledger of collectives: what this process asked of `torch.distributed`, in order.

Owns the wrapping of the public communication functions, from outside, so that any implementation is recorded without
its help: op, group, payload and the line that called.  A call made by another recorded call is a part of it, not
counted.
Leaves what C++ sends on its own (DistributedDataParallel's buckets, functional collectives): no Python function shows
it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from minigpt_dist.launch import in_flight, mirror
from minigpt_dist.launch.mirror import Mirror

__all__ = ["attach", "clear", "entries", "install", "seconds"]

# op -> the parameter that holds what this rank brings, or where it receives and brings nothing; None: no tensors.
_PAYLOAD: dict[str, str | None] = {
    "all_reduce": "tensor",
    "all_reduce_coalesced": "tensors",
    "all_gather": "tensor",
    "all_gather_into_tensor": "input_tensor",
    "all_gather_single": "input_tensor",
    "all_gather_coalesced": "input_tensor_list",
    "_all_gather_base": "input_tensor",
    "reduce_scatter": "input_list",
    "reduce_scatter_tensor": "input",
    "reduce_scatter_single": "input",
    "_reduce_scatter_base": "input",
    "all_to_all": "input_tensor_list",
    "all_to_all_single": "input",
    "broadcast": "tensor",
    "reduce": "tensor",
    "gather": "tensor",
    "scatter": "tensor",
    "send": "tensor",
    "recv": "tensor",
    "isend": "tensor",
    "irecv": "tensor",
    "batch_isend_irecv": "p2p_op_list",
    **dict.fromkeys(("init_process_group", "new_group", "barrier", "monitored_barrier")),
    **dict.fromkeys(("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list")),
    **dict.fromkeys(("send_object_list", "recv_object_list")),
}
_PEERS = ("dst", "src", "group_dst", "group_src")
_FOREIGN = (os.path.dirname(torch.__file__) + os.sep, __file__, contextlib.__file__)  # frames that are no call site


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
    for op, payload in _PAYLOAD.items():
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
        entry = _entry(op, given, given.get(payload) if payload else None)
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
            _mirror.wait(f"{call.entry['op']}'s wait", _site(), _detail(call.entry))
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


def _entry(op: str, given: dict[str, Any], payload: Any) -> dict[str, Any]:
    if op == "batch_isend_irecv" and payload:
        sends = [p2p.tensor for p2p in payload if p2p.op.__name__ == "isend"]
        given, payload = {"group": payload[0].group}, sends
    dtype, numel, size = None, 0, 0
    for tensor in _tensors(payload):
        dtype, count = tensor.dtype, tensor.numel()
        numel, size = numel + count, size + count * tensor.element_size()
    return {
        "op": op,
        "group": _ranks(op, given),
        "dtype": None if dtype is None else str(dtype).removeprefix("torch."),
        "numel": numel,
        "bytes": size,
        "site": _site(),
        "peer": next((given[name] for name in _PEERS if given.get(name) is not None), None),
        "done": False,
    }


def _tensors(payload: Any) -> Iterable[torch.Tensor]:
    if isinstance(payload, torch.Tensor):
        return (payload,)
    return (tensor for item in payload for tensor in _tensors(item)) if isinstance(payload, (list, tuple)) else ()


def _ranks(op: str, given: dict[str, Any]) -> list[int]:
    """The global ranks of the call's group; empty where this process is no member or there is no group at all."""
    try:
        if op == "new_group" and given.get("ranks") is not None:
            return sorted(given["ranks"])
        group = given.get("group")
        if group == dist.GroupMember.NON_GROUP_MEMBER:
            return []
        return dist.get_process_group_ranks(group or dist.group.WORLD)  # before torch 2.7, None was no group to it
    except Exception:  # whatever is wrong with the group, it is for the call itself to say
        return []


def _site() -> str:
    frame = sys._getframe(1)
    while frame.f_code.co_filename.startswith(_FOREIGN) and frame.f_back is not None:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _note(entry: dict[str, Any]) -> int:
    index = next(_count)
    _entries.append(entry)
    if _mirror is not None:
        _mirror.write(index, entry["op"], entry["site"], _detail(entry))
    return index


def _detail(entry: dict[str, Any]) -> str:
    """Payload, group and peer, as in `float32[120] on ranks [0, 1]`."""
    group, peer = entry["group"], entry["peer"]
    payload = f"{entry['dtype']}[{entry['numel']}] " if entry["dtype"] else ""
    ranks = f"ranks {group}" if len(group) <= 16 else f"{len(group)} ranks"
    return f"{payload}on {ranks}" + ("" if peer is None else f", peer {peer}")


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
