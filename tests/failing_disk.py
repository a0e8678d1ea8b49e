"""A disk that counts the calls that reach it, fails at the k-th, and loses what was not synced when its power goes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

CALLS = ("open", "write", "fsync", "rename", "replace", "mkdir", "unlink", "rmdir", "scandir", "listdir")
REAL = {name: getattr(os, name) for name in CALLS}


class Dead(BaseException):
    """The process is dead: no handler of the code under test may run."""


class Disk:
    """Counts the calls that reach the disk and does `act(name)` in place of the k-th; fsync only takes note.

    What was written or named since the last fsync of its file or folder is remembered: `lose_power` can undo it.
    """

    def __init__(self, at: int | None = None, act: Callable[[str], None] = lambda name: None) -> None:
        self.at, self.act, self.calls, self.dead = at, act, list[str](), False
        self._dirty: dict[int, int] = {}  # inode -> a descriptor of the file
        self._unsynced: list[tuple[int, Callable[[], object]]] = []  # inode of the folder, how to undo

    def __enter__(self) -> Disk:
        for name in CALLS:
            setattr(os, name, self._wrapped(name))
        return self

    def __exit__(self, *_: object) -> None:
        for name in CALLS:
            setattr(os, name, REAL[name])

    def close(self) -> None:
        for fd in self._dirty.values():
            os.close(fd)

    def _wrapped(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.dead:
                raise Dead
            self.calls.append(name)
            if len(self.calls) - 1 == self.at:
                if name == "write":
                    REAL["write"](args[0], args[1][: len(args[1]) // 2])
                self.act(name)
            return getattr(self, f"_{name}", REAL[name])(*args, **kwargs)

        return call

    def _open(self, path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        fd: int = REAL["open"](path, flags, *args, **kwargs)
        if flags & os.O_CREAT:
            self._dirty[os.fstat(fd).st_ino] = os.dup(fd)
            self._named(Path(path), lambda: REAL["unlink"](path))
        return fd

    def _fsync(self, fd: int) -> None:
        inode = os.fstat(fd).st_ino
        if inode in self._dirty:
            os.close(self._dirty.pop(inode))
        self._unsynced = [(folder, undo) for folder, undo in self._unsynced if folder != inode]

    def _mkdir(self, path: Any, *args: Any, **kwargs: Any) -> None:
        REAL["mkdir"](path, *args, **kwargs)
        self._named(Path(path), lambda: shutil.rmtree(path))

    def _rename(self, source: Any, target: Any) -> None:
        REAL["rename"](source, target)
        self._named(Path(target), lambda: REAL["rename"](target, source))

    def _replace(self, source: Any, target: Any) -> None:
        before = Path(target).read_bytes() if os.path.exists(target) else None
        REAL["replace"](source, target)
        self._named(Path(target), lambda: Path(target).write_bytes(before) if before else REAL["unlink"](target))

    def _named(self, path: Path, undo: Callable[[], object]) -> None:
        self._unsynced.append((os.stat(path.parent).st_ino, undo))

    def lose_power(self, lose_names: bool) -> None:
        """Empties files that were not fsynced, and takes back names whose folders were not."""
        for fd in self._dirty.values():
            os.ftruncate(fd, 0)
        for _, undo in reversed(self._unsynced if lose_names else []):
            with suppress(FileNotFoundError):  # what the save itself has removed again
                undo()
