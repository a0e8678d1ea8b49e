"""Removing a folder that foreign code has filled: however deep, whatever its modes, however many files.

Owns that walk. Standard library only: it is a part of every sandbox.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Callable
from pathlib import Path

__all__ = ["remove_tree"]


def remove_tree(folder: Path | str) -> None:
    """Remove a folder and all in it, links not followed. What cannot be removed stays, and so does the folder then.

    Folders inside are moved up before they are emptied, so that no path grows long and nothing is called deeper: `shutil.rmtree` ends
    in a RecursionError, or without descriptors, below a thousand folders in one another.
    """
    top = os.fspath(folder)
    while left := _entries(top):
        removed = [_remove(top, entry) for entry in left]
        if not any(removed):
            return
    with contextlib.suppress(OSError):
        os.rmdir(top)


def _remove(top: str, entry: os.DirEntry[str]) -> bool:
    """Remove an entry of `top`; of a folder, its files, its folders becoming entries of `top`. Whether anything was done."""
    if not entry.is_dir(follow_symlinks=False):
        return _done(os.unlink, entry.path)
    _done(os.chmod, entry.path, 0o700)
    moved = [
        _done(os.rename, inner.path, os.path.join(top, uuid.uuid4().hex))
        if inner.is_dir(follow_symlinks=False) and _done(os.chmod, inner.path, 0o700)
        else _done(os.unlink, inner.path)
        for inner in _entries(entry.path)
    ]
    return _done(os.rmdir, entry.path) or any(moved)


def _entries(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            return list(found)
    except OSError:
        return []


def _done(call: Callable[..., None], *args: object) -> bool:
    try:
        call(*args)
    except OSError:
        return False
    return True
