"""What torch.cuda offers for measuring and ordering work, where there is no CUDA: calls that do nothing, instead of errors.

A wrapper may time its collectives by events, mark them for a profiler, or wait for the device, and average gradients rightly all the
same. Owns just these names; `torch.cuda.is_available()` still says no, and a tensor still cannot be moved to a device that is not there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

QUIET = ("synchronize", "set_device", "reset_peak_memory_stats", "reset_max_memory_allocated", "empty_cache")
MARKS = ("range_push", "range_pop", "range_start", "range_end", "mark")
MOMENTS = ("Event", "Stream", "stream", "current_stream", "default_stream")
NAMED = (b"torch.cuda", b"nvtx", b"from torch import cuda")


class Moment:
    """Stands for an event or a stream: everything of it has happened, and takes no time."""

    def __init__(self, *args: Any, **options: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _quiet(name)

    def __enter__(self) -> Moment:
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def elapsed_time(self, other: object) -> float:
        return 0.0

    def query(self) -> bool:
        return True

    def record_event(self, event: Any = None) -> Any:
        return event or Moment()


def stand_in_for_cuda() -> None:
    """Put the stand-ins into torch.cuda, unless CUDA is there."""
    if torch.cuda.is_available():
        return
    for module, names in ((torch.cuda, QUIET), (torch.cuda.nvtx, MARKS)):
        for name in names:
            setattr(module, name, _quiet(name))
    for name in MOMENTS:
        setattr(torch.cuda, name, type(name, (Moment,), {}))


def names_cuda(text: bytes) -> bool:
    """Does a source name anything of torch.cuda?"""
    return any(name in text for name in NAMED)


def _quiet(name: str) -> Callable[..., None]:
    """A call that does nothing; an object of its own for each name, as torch's compiler keeps rules by them."""

    def call(*args: Any, **options: Any) -> None:
        return None

    call.__name__ = name
    return call
