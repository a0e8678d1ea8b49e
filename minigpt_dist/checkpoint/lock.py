"""Who is using a folder, told by the kernel: an advisory lock (flock) on the folder itself, gone with its process.

A process id in a name can be reused or belong to another machine, a lock file outlives its owner; this does neither.
It follows a folder through a rename and needs no file. Nobody ever waits for it: who finds a folder in use leaves it.

Owns taking and releasing. Leaves what a lock allows to its callers.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path

__all__ = ["Hold", "hold"]

UNSUPPORTED = {errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}  # some network file systems


class Hold(Enum):
    """What came of asking for a lock: ours, someone else's, or this file system has none."""

    OURS = "ours"
    BUSY = "busy"
    UNKNOWN = "unknown"


@contextmanager
def hold(folder: Path, *, shared: bool = False) -> Iterator[Hold]:
    """Tries to lock `folder` for the block: shared for readers, else exclusive. OSError if it cannot be opened."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield _try_lock(fd, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
    finally:
        # Closing alone would leave the lock to any process forked meanwhile.
        _unlock(fd)
        os.close(fd)


def _try_lock(fd: int, kind: int) -> Hold:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return Hold.BUSY
    except OSError as error:
        if error.errno in UNSUPPORTED:
            return Hold.UNKNOWN
        raise
    return Hold.OURS


def _unlock(fd: int) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_UN)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
