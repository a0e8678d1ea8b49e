"""What a process in a sandbox may use, and under which user: applied from inside, before any foreign code runs.

Owns resource limits and the giving up of privileges. Standard library only: it is a part of every sandbox.
"""

from __future__ import annotations

import ctypes
import os
import resource
from typing import NamedTuple

from minigpt_dist.launch.syscalls import forbid_calls

__all__ = ["Limits", "become", "confine"]

_PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 4, 24, 36, 38
_LAST_CAPABILITY = 63
_CAPABILITY_VERSION_3 = 0x20080522


class Limits(NamedTuple):
    """Most that each process may have; `processes` counts those of the sandbox's user, threads included
    (a rank has four); None where that user has others.

    memory_bytes: of addresses; torch with gloo takes 0.6 GB before anything is computed. file_bytes: of one file. total_bytes: memory of
    all processes together, beyond what each has from the server.
    """

    processes: int | None = 256
    memory_bytes: int = 4 << 30
    file_bytes: int = 64 << 20
    cpu_s: int = 900
    descriptors: int = 1024
    total_bytes: int = 6 << 30


def confine(limits: Limits) -> None:
    """Limit this process and all that it will fork; adopt orphans, so that a daemon is still a child to end."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)  # no rank may look into the server or stop it in a debugger
    for kind, most in (
        (resource.RLIMIT_NPROC, limits.processes),
        (resource.RLIMIT_AS, limits.memory_bytes),
        (resource.RLIMIT_FSIZE, limits.file_bytes),
        (resource.RLIMIT_CPU, limits.cpu_s),
        (resource.RLIMIT_NOFILE, limits.descriptors),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(kind)
        if most is not None:
            most = most if hard == resource.RLIM_INFINITY else min(most, hard)
            resource.setrlimit(kind, (most, most))


def become(user: int | None, walled: bool) -> None:
    """In a rank: give up every privilege for good, and root for the sandbox's own user. Without a `user` there was no root to give up,
    and without walls either, nothing but that: it is code that is trusted."""
    libc = ctypes.CDLL(None, use_errno=True)
    prctl = libc.prctl
    for capability in range(_LAST_CAPABILITY + 1):
        prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    libc.capset((ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)())
    prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)  # its own /proc/self is a rank's to read
    if walled or user is not None:
        forbid_calls()
