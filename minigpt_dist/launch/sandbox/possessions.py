"""What the user of a sandbox without walls has left on this machine: files where all may write, and System V shared memory and queues.

Owns finding and removing them. Leaves the user's processes, and the sandbox's own folder, to `jail.py`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import tempfile
from pathlib import Path

from minigpt_dist.launch.removal import remove_tree

__all__ = ["remove_possessions"]

_IPC_RMID = 0
_CONTROL = {"shm": ("shmctl", (_IPC_RMID,)), "msg": ("msgctl", (_IPC_RMID,)), "sem": ("semctl", (0, _IPC_RMID))}


def remove_possessions(user: int) -> None:
    """Remove everything of a user that nobody had before, whose processes have ended."""
    waiting = [*dict.fromkeys(("/tmp", "/var/tmp", "/dev/shm", "/dev/mqueue", "/run/lock", tempfile.gettempdir()))]
    while waiting:
        for entry in _entries(waiting.pop()):
            with contextlib.suppress(OSError):
                about = entry.stat(follow_symlinks=False)
                is_folder = entry.is_dir(follow_symlinks=False)
                if about.st_uid != user:
                    if is_folder and about.st_mode & 0o002:  # of another's, but open to all
                        waiting.append(entry.path)
                elif is_folder:
                    remove_tree(entry.path)
                else:
                    os.unlink(entry.path)
    for kind in _CONTROL:
        _remove_ipc(kind, user)


def _entries(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            return list(found)
    except OSError:
        return []


def _remove_ipc(kind: str, user: int) -> None:
    """Remove the user's System V objects of one kind, as /proc/sysvipc lists them."""
    with contextlib.suppress(OSError):
        head, *rows = [line.split() for line in Path("/proc/sysvipc", kind).read_text().splitlines()]
        for row in rows:
            about = dict(zip(head, row, strict=False))
            if int(about["uid"]) == user:
                name, arguments = _CONTROL[kind]
                getattr(ctypes.CDLL(None), name)(int(row[1]), *arguments, None)
