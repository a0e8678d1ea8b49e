"""Removing a folder that foreign code has filled: however deep, whatever its modes, however many files.

Owns that walk. Standard library only: it is a part of every sandbox.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

__all__ = ["remove_tree"]

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def remove_tree(folder: Path | str) -> None:
    """Remove a folder and all in it, links not followed. What cannot be removed stays, and so do the folders around it.

    One folder is open at a time, and the way back is "..": `shutil.rmtree` ends in a RecursionError, or without descriptors, below a
    thousand folders in one another.
    """
    with contextlib.suppress(OSError):
        _empty(os.open(folder, _FOLDER))
    with contextlib.suppress(OSError):
        os.rmdir(folder)


def _empty(here: int) -> None:
    """Remove all that is in an open folder, and close it."""
    try:
        names: list[str] = []
        left = [_without_files(here)]
        while left[-1] or names:
            if left[-1]:
                name = left[-1].pop()
                inner = _opened(name, here)
                if inner is not None:
                    os.close(here)
                    here = inner
                    names.append(name)
                    left.append(_without_files(here))
            else:
                above = os.open("..", _FOLDER, dir_fd=here)
                os.close(here)
                here = above
                left.pop()
                with contextlib.suppress(OSError):
                    os.rmdir(names.pop(), dir_fd=here)
    finally:
        os.close(here)


def _opened(name: str, here: int) -> int | None:
    """A folder inside of another, made readable first; None if that cannot be."""
    with contextlib.suppress(OSError):
        os.chmod(name, 0o700, dir_fd=here)
        return os.open(name, _FOLDER, dir_fd=here)
    return None


def _without_files(here: int) -> list[str]:
    """Remove what is no folder; the names of the folders."""
    with os.scandir(here) as found:
        entries = list(found)
    folders = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    for entry in entries:
        if not entry.is_dir(follow_symlinks=False):
            with contextlib.suppress(OSError):
                os.unlink(entry.name, dir_fd=here)
    return folders
