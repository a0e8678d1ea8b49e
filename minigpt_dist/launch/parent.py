"""A process that ends with the one that started it, however that ends: the kernel sees to it, on Linux.

Owns the one call. Callable between fork and exec: it only calls into libc, which is loaded by then.
"""

from __future__ import annotations

import ctypes
import signal
import sys

__all__ = ["die_with_parent"]

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def die_with_parent() -> None:
    """Have this process killed when the thread that started it ends. Nothing elsewhere than on Linux."""
    if sys.platform == "linux":
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
