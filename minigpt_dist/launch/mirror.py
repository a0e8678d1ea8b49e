"""The last communication calls of a rank, in a small memory-mapped file that outlives it.

Owns the file's layout: a count of all calls, a ring of the last 16 as text, each with its state, and the wait that
the rank is in.  The rank writes, without a system call; its parent reads, also when the rank is stuck in C or dead.
What is read is text for messages and nothing more.
Leaves the choice of what to write to `ledger`.
"""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path
from typing import NamedTuple

__all__ = ["SLOTS", "Call", "Mirror", "create_mirror", "read_mirror"]

SLOTS = 16
_SLOT_BYTES = 384
_TEXT_BYTES = _SLOT_BYTES - 2  # beside the state and the zero at the end
_HEAD = struct.Struct("!Q")  # calls since the last clear
_SIZE = _HEAD.size + (SLOTS + 1) * _SLOT_BYTES  # the last slot is the wait's: its call may have left the ring long ago

RUNNING, PENDING, WAITING, DONE, FAILED = b"R", b"P", b"W", b"D", b"F"
_STATES = {RUNNING: "in the call", PENDING: "not waited for", WAITING: "in wait()", DONE: "done", FAILED: "raised"}


class Call(NamedTuple):
    """One call as its rank's ledger shows it: `op`, `site` as "file:line", `detail` (payload, group, peer), `state`."""

    op: str
    site: str
    detail: str
    state: str

    @property
    def blocks(self) -> bool:
        """Whether the rank was inside this call, or waiting for its end."""
        return self.state in (_STATES[RUNNING], _STATES[WAITING])

    def __str__(self) -> str:
        return f"{self.op} {self.detail} at {self.site}: {self.state}"


class Mirror:
    """The writing end, owned by one rank.  `path` must have been made by `create_mirror`."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _SIZE)
        self._total = 0

    def write(self, index: int, op: str, site: str, detail: str) -> None:
        """Put call number `index` (from 0), now running, in place of the oldest."""
        self._put(index % SLOTS, RUNNING, op, site, detail)
        self._total = index + 1
        _HEAD.pack_into(self._map, 0, self._total)

    def mark(self, index: int, state: bytes) -> None:
        """Change the state of call number `index`, if it is still among the last."""
        if self._total - SLOTS <= index < self._total:
            self._map[_start(index % SLOTS)] = state[0]

    def wait(self, op: str, site: str, detail: str) -> None:
        """Show that the rank now waits for an asynchronous call to end."""
        self._put(SLOTS, WAITING, op, site, detail)

    def waited(self) -> None:
        """Show that the wait is over."""
        self._map[_start(SLOTS)] = DONE[0]

    def _put(self, slot: int, state: bytes, op: str, site: str, detail: str) -> None:
        text = f"{op}\t{site}\t{detail}".encode(errors="replace")
        if len(text) > _TEXT_BYTES:  # a long path keeps its end, where the line is
            room = max(1, _TEXT_BYTES - len(op) - len(detail) - 2)
            text = f"{op}\t{site[-room:]}\t{detail}".encode("ascii", errors="replace")[:_TEXT_BYTES]
        start = _HEAD.size + slot * _SLOT_BYTES
        self._map[start : start + len(text) + 2] = state + text + b"\0"

    def clear(self) -> None:
        """Forget all calls."""
        self._map[:] = bytes(_SIZE)
        self._total = 0


def create_mirror(path: Path) -> int:
    """Make an empty mirror and return a descriptor to read it by: it stays good whatever the rank does to the path."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    os.ftruncate(fd, _SIZE)
    return fd


def read_mirror(fd: int) -> tuple[int, list[Call]]:
    """Return the number of calls since the last clear and the last of them, oldest first, then the wait the rank is in.

    Reads what is there: a torn or overwritten slot is left out, never an error.
    """
    data = os.pread(fd, _SIZE, 0).ljust(_SIZE, b"\0")
    total = int(_HEAD.unpack_from(data)[0])
    ring = [_call(data, index % SLOTS) for index in range(max(0, total - SLOTS), total)]
    wait = _call(data, SLOTS)
    return total, [call for call in ring if call] + ([wait] if wait and wait.blocks else [])


def _start(slot: int) -> int:
    return _HEAD.size + slot * _SLOT_BYTES


def _call(data: bytes, slot: int) -> Call | None:
    start = _start(slot)
    state = _STATES.get(data[start : start + 1])
    text, _, _ = data[start + 1 : start + _SLOT_BYTES].partition(b"\0")
    fields = text.decode(errors="replace").split("\t")
    return Call(fields[0], fields[1], fields[2], state) if state is not None and len(fields) == 3 else None
