"""The folders of sandboxes whose parent was killed before it could remove them: the next parent does.

Owns telling them apart from those in use, by a lock that ends with the process that holds it, whichever way it ends. Leaves a folder's
ordinary end to `jail.py`.
"""

from __future__ import annotations

import fcntl
import functools
import os
import tempfile
from pathlib import Path

from minigpt_dist.launch.removal import remove_tree

__all__ = ["owned_folder", "sweep"]

_PREFIX, _OWNER = "minigpt-dist-jail-", "owner"


def owned_folder() -> tuple[Path, int]:
    """A new folder, and the descriptor that keeps it from being swept: close it once the folder is gone."""
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    owner = os.open(folder / f"{_OWNER}.new", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(owner, fcntl.LOCK_EX)
    os.rename(folder / f"{_OWNER}.new", folder / _OWNER)  # seen by others only once it is locked
    return folder, owner


@functools.cache
def sweep() -> None:
    """Remove this user's folders that no process owns any more; once a process."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        try:
            owner = os.open(folder / _OWNER, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:  # another user's, or just being made or removed
            continue
        try:
            fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(owner).st_uid == os.geteuid():
                remove_tree(folder)
        except BlockingIOError:
            pass  # in use
        finally:
            os.close(owner)
