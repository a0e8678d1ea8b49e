"""A forked child that saves, and in which a file operation or a byte can be made fatal: what a crash or a full disk does.

Python's own file operations are seen by an audit hook, whatever name they are called by; bytes written by any library, in any language,
are met by the kernel's limit on file size. Between the two, no way of writing a file escapes.

Owns the child's life and its faults. Leaves what is asked of it to `checkpoint_probe.py`.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

CHILD_S = 20  # a save of a few kilobytes that takes longer is stuck
KILLED = 87
PUBLISH = ("os.rename", "os.link", "os.symlink")
REMOVE = ("os.remove", "os.rmdir")
OTHERS = ("os.mkdir", "os.truncate")
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


@dataclass(frozen=True)
class Hit:
    """What goes wrong: at file operation `op` (from 0), or at byte `at_byte` of any file. fatal: the process ends; else an OSError."""

    fatal: bool
    op: int | None = None
    at_byte: int | None = None


WATCHED = Hit(fatal=False)  # strikes nowhere


@dataclass
class Ended:
    """How the child ended: "returned" `value` (JSON), "raised" or "exited" with `said`, "killed" by its hit, or "died" otherwise.

    ops: the file operations it began, such as "open rank0.bin"; "rename-old" moves what was there before.
    """

    end: str
    value: Any = None
    said: str = ""
    ops: list[str] = field(default_factory=list)


def run_forked(action: Callable[[], Any], hit: Hit | None = None, existing: frozenset[str] = frozenset()) -> Ended:
    """`action()` in a forked child, which `hit` befalls. existing: paths that are there before."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(read_end)
            _live(action, hit, existing, write_end)
        finally:
            os._exit(1)  # nothing of the parent's may be finished twice
    os.close(write_end)
    with open(read_end, "rb") as pipe:
        lines = pipe.read().splitlines()
    return _ended(lines, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


def _ended(lines: list[bytes], code: int) -> Ended:
    ops = [line[3:].decode(errors="replace") for line in lines if line.startswith(b"op ")]
    last = [json.loads(line) for line in lines if line.startswith(b"{")]
    if last:
        return Ended(**last[-1], ops=ops)
    if code in (KILLED, signal.SIGXFSZ):
        return Ended("killed", ops=ops)
    stuck = code == -signal.SIGALRM
    return Ended("died", said=f"still running after {CHILD_S} s" if stuck else f"exit code {code}", ops=ops)


def said(error: BaseException) -> str:
    """The error's class and text; foreign `__str__` may fail."""
    try:
        return f"{type(error).__name__}: {error}"[:400]
    except Exception:
        return type(error).__name__


def _live(action: Callable[[], Any], hit: Hit | None, existing: frozenset[str], out: int) -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(CHILD_S)
    sys.dont_write_bytecode = True  # an import inside the save would write files that are none of the checkpoint
    with open(os.devnull, "wb") as null:
        os.dup2(null.fileno(), 1)
        os.dup2(null.fileno(), 2)
    watch = _Watch(hit, existing, out)
    if hit is not None:
        watch.arm()
    try:
        end: dict[str, Any] = {"end": "returned", "value": action()}
    except Exception as error:
        end = {"end": "raised", "said": said(error)}
    except BaseException as error:
        end = {"end": "exited", "said": said(error)}
    watch.on = False
    with open(out, "wb") as pipe:
        pipe.write(json.dumps(end).encode() + b"\n")
    os._exit(0)


class _Watch:
    """Reports file operations as they begin, and strikes at one."""

    def __init__(self, hit: Hit | None, existing: frozenset[str], out: int) -> None:
        self.hit, self.existing, self.out, self.count, self.on = hit, existing, out, 0, True

    def arm(self) -> None:
        os.fsync = os.fdatasync = lambda fd: None  # type: ignore[assignment]  # a killed process loses nothing the system has taken
        sys.addaudithook(self.see)
        if self.hit is not None and self.hit.at_byte is not None:
            if self.hit.fatal:
                self._die_at_limit()
            hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.hit.at_byte, hard))

    @staticmethod
    def _die_at_limit() -> None:
        """A C handler: a Python one would run only after the failed write had been handled, and the default one dumps core."""
        libc = ctypes.CDLL(None)
        libc.signal.argtypes, libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
        libc.signal(signal.SIGXFSZ, ctypes.cast(libc._exit, ctypes.c_void_p))

    def see(self, event: str, args: tuple[Any, ...]) -> None:
        operation = self._operation(event, args) if self.on else None
        if operation is None:
            return
        os.write(self.out, f"op {operation}\n".encode(errors="replace"))
        strike = self.hit is not None and self.hit.op == self.count
        self.count += 1
        if strike and self.hit is not None and self.hit.fatal:
            os._exit(KILLED)
        if strike:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _operation(self, event: str, args: tuple[Any, ...]) -> str | None:
        if event == "open":
            writes = isinstance(args[2], int) and args[2] & WRITING and not isinstance(args[0], int) and args[0] != os.devnull
            return f"open {_name(args[0])}" if writes else None
        if event == "os.rename":
            moved = "rename-old" if os.path.abspath(os.fsdecode(args[0])) in self.existing else "rename"
            return f"{moved} {_name(args[0])} to {_name(args[1])}"
        if event in (*PUBLISH, *REMOVE, *OTHERS):
            return f"{event.removeprefix('os.')} {_name(args[0])}"
        return None


def _name(path: Any) -> str:
    return "a descriptor" if isinstance(path, int) else os.path.basename(os.fsdecode(path))


def keeps_old(done: list[str], whole: list[str]) -> bool:
    """Must the old checkpoint in the same folder still load after the operations `done`, where the whole save does `whole`?

    Yes until the first new file takes its final name. Taking the old one away counts as that only once nothing is left to be written.
    """
    writes = [i for i, op in enumerate(whole) if op.startswith("open ")]
    last_write = writes[-1] if writes else -1
    for i, op in enumerate(done):
        if op.startswith(("rename ", "link ", "symlink ")):
            return False
        if op.startswith(("rename-old ", "remove ", "rmdir ")) and i > last_write:
            return False
    return True
