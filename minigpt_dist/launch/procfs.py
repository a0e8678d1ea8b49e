"""What the kernel tells of a server's processes and network: counted from outside the ranks, so that they cannot say otherwise.

Owns reading /proc. Standard library only: it is a part of every sandbox.
"""

from __future__ import annotations

import os

__all__ = ["children", "held_bytes", "loopback_bytes", "private_bytes_of_others"]

_IN_MEMORY = ("/tmp", "/dev/shm")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def children() -> list[int]:
    """Pids of this process's children; orphans of its ranks are among them, where it adopts."""
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return [int(word) for word in file.read().split()]


def loopback_bytes() -> int:
    """Bytes that the loopback of this network has carried so far."""
    with open("/proc/self/net/dev") as file:
        return next(int(line.split(":")[1].split()[0]) for line in file if line.strip().startswith("lo:"))


def private_bytes_of_others() -> int:
    """Memory of all other processes in this namespace that no file backs, beyond what each has from this process by fork."""
    own = _private_bytes("self")
    others = [pid for pid in os.listdir("/proc") if pid.isdigit() and int(pid) not in (1, os.getpid())]
    return sum(max(0, _private_bytes(pid) - own) for pid in others)


def held_bytes() -> int:
    """Memory of all other processes in this namespace that no file on disk backs, and what lies in its own file systems in memory."""
    others = [pid for pid in os.listdir("/proc") if pid.isdigit() and int(pid) not in (1, os.getpid())]
    systems = {
        (about.f_fsid, (about.f_blocks - about.f_bfree) * about.f_frsize) for about in map(os.statvfs, _IN_MEMORY)
    }
    return sum(map(_resident_bytes, others)) + sum(used for _, used in systems)


def _resident_bytes(pid: str) -> int:
    try:
        with open(f"/proc/{pid}/status") as file:
            rows = dict(line.split(":", 1) for line in file)
        return sum(int(rows[kind].split()[0]) << 10 for kind in ("RssAnon", "RssShmem"))
    except (OSError, KeyError):
        return 0  # it has ended


def _private_bytes(pid: str) -> int:
    try:
        with open(f"/proc/{pid}/statm") as file:
            _, resident, shared, *_ = map(int, file.read().split())
    except OSError:
        return 0  # it has ended
    return (resident - shared) * _PAGE_BYTES
