"""A forked child that saves, and what can befall it: a file operation that fails, a full disk, a sudden end.

Python's own file operations are seen by an audit hook, whatever name they are called by; bytes written by any library,
in any language, meet the kernel's limit on file size. Between the two, no way of writing a file escapes.

Owns the child's life and these two instruments. Leaves what is tried with them to `checkpoint_crash.py`.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch

Tell = Callable[[str], None]

CHILD_S = 40  # a few kilobytes that take longer to save are stuck
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
OPERATIONS = ("os.link", "os.symlink", "os.remove", "os.rmdir", "os.mkdir", "os.truncate")


@dataclass
class Ended:
    """How a child ended: "returned" its value (JSON), "raised" or "exited" with `said`, "killed" at a limit, or "died".

    told: the lines it sent while it lived.
    """

    end: str
    value: Any = None
    said: str = ""
    told: list[str] = field(default_factory=list)

    def words(self) -> str:
        """`raised OSError: ...`."""
        return f"{self.end} {self.said}".strip()


def run_forked(action: Callable[[Tell], Any]) -> Ended:
    """`action(tell)` in a forked child. What it prints is lost; what it tells arrives even if it is killed."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(read_end)
            _live(action, write_end)
        finally:
            os._exit(1)  # nothing of the parent's may be finished twice
    os.close(write_end)
    with open(read_end, "rb") as pipe:
        lines = pipe.read().splitlines()
    return _ended(lines, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


def said(error: BaseException) -> str:
    """The error's class and text; foreign `__str__` may fail."""
    try:
        return f"{type(error).__name__}: {error}"[:400]
    except Exception:  # of the foreign `__str__`: the class alone still says what was raised
        return type(error).__name__


def _live(action: Callable[[Tell], Any], out: int) -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(CHILD_S)
    torch.set_num_threads(
        1
    )  # a pool does not survive a fork: threads that ask for it together, before it is made anew, fail
    sys.dont_write_bytecode = True  # an import inside a save would write files that are none of the checkpoint's
    with open(os.devnull, "wb") as null:
        os.dup2(null.fileno(), 1)
        os.dup2(null.fileno(), 2)
    try:
        end = {"end": "returned", "value": action(lambda line: _send(out, b"-" + line.encode(errors="replace")))}
    except Exception as error:
        end = {"end": "raised", "said": said(error)}
    except BaseException as error:
        end = {"end": "exited", "said": said(error)}
    _send(out, json.dumps(end).encode())
    os._exit(0)


def _send(out: int, line: bytes) -> None:
    line = line.replace(b"\n", b" ") + b"\n"
    while line:
        line = line[os.write(out, line) :]


def _ended(lines: list[bytes], code: int) -> Ended:
    told = [line[1:].decode(errors="replace") for line in lines if line.startswith(b"-")]
    if lines and lines[-1].startswith(b"{"):
        return Ended(**json.loads(lines[-1]), told=told)
    if code == signal.SIGXFSZ:
        return Ended("killed", told=told)
    stuck = code == -signal.SIGALRM
    return Ended("died", said=f"still running after {CHILD_S} s" if stuck else f"exit code {code}", told=told)


class FileWatch:
    """While entered, calls `before(i, operation)` before the i-th file operation, which raises what that does.

    An operation is named like "open rank0.bin" or "rename a to b"; "rename-old" moves one of the paths in `existing`.
    To be made once, in a child only: an audit hook cannot be taken back.
    """

    def __init__(self, existing: frozenset[str] = frozenset()) -> None:
        self.before: Callable[[int, str], None] = lambda i, operation: None
        self._existing, self._count, self._on = existing, 0, False
        sys.addaudithook(self._see)

    def __enter__(self) -> FileWatch:
        self._count, self._on = 0, True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._on = False

    def _see(self, event: str, args: tuple[Any, ...]) -> None:
        operation = self._operation(event, args) if self._on else None
        if operation is None:
            return
        self._on = False  # what `before` does is not the save's
        try:
            self.before(self._count, operation)
        finally:
            self._count, self._on = self._count + 1, True

    def _operation(self, event: str, args: tuple[Any, ...]) -> str | None:
        if event == "open":
            path, _, flags = args
            writes = isinstance(flags, int) and flags & WRITING and not isinstance(path, int) and path != os.devnull
            return f"open {_name(path)}" if writes else None
        if event == "os.rename":
            old = os.path.abspath(os.fsdecode(args[0])) in self._existing
            return f"{'rename-old' if old else 'rename'} {_name(args[0])} to {_name(args[1])}"
        return f"{event.removeprefix('os.')} {_name(args[0])}" if event in OPERATIONS else None


def _name(path: Any) -> str:
    return "a descriptor" if isinstance(path, int) else os.path.basename(os.fsdecode(path))


def skip_fsync() -> None:
    """In a child: do not wait for the disk. A kill, unlike a power cut, loses nothing that the system has taken."""
    for name in ("fsync", "fdatasync"):
        setattr(os, name, lambda fd: None)


@contextmanager
def file_size_limit(at_byte: int, fatal: bool) -> Iterator[None]:
    """No file may grow beyond `at_byte` bytes: writing more raises OSError, or, if fatal, ends the process there."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if fatal:
        # A handler in C: one in Python would run only after the save had handled the error, the default one dumps core.
        libc = ctypes.CDLL(None)
        libc.signal.argtypes, libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
        libc.signal(signal.SIGXFSZ, ctypes.cast(libc._exit, ctypes.c_void_p))
    resource.setrlimit(resource.RLIMIT_FSIZE, (at_byte, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def keeps_old(done: list[str], whole: list[str]) -> bool:
    """Must the old checkpoint in the folder still load after the operations `done`, where the whole save does `whole`?

    Yes until the first new file takes its final name. Taking the old one away is excused once nothing is left to write.
    """
    last_write = max((i for i, operation in enumerate(whole) if operation.startswith("open ")), default=-1)
    for i, operation in enumerate(done):
        kind = operation.split(" ", 1)[0]
        if kind in ("rename", "link", "symlink") or (kind in ("rename-old", "remove", "rmdir") and i > last_write):
            return False
    return True
