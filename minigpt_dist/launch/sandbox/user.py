"""The user that a sandbox's ranks become where the machine's own root makes it: an id of nobody's, and the end of all that is its.

Owns the choice of the id. Leaves becoming it to `launch/limits.py`.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal

__all__ = ["end_all_of", "fresh_user"]


def fresh_user() -> int:
    """A user id that nobody has, and that no sandbox before had: what the kernel keeps for a user (keys, counts) starts empty."""
    with open("/proc/self/uid_map") as file:
        mapped = max(int(line.split()[0]) + int(line.split()[2]) for line in file)
    if mapped > 1 << 30:
        return (1 << 29) + secrets.randbelow(1 << 29)
    return mapped // 2 + secrets.randbelow(mapped // 4)


def end_all_of(user: int) -> None:
    """Kill every process of `user`, which no process group and no session can hide: as that user, from a child that ends with them."""
    pid = os.fork()
    if pid == 0:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
        with contextlib.suppress(OSError):
            os.kill(-1, signal.SIGKILL)
        os._exit(0)
    os.waitpid(pid, 0)
