"""System calls that no rank of a sandbox needs, refused by a seccomp filter (seccomp(2), in classic BPF).

Owns the list. They take memory that no process shows (nameless files, System V objects), keep notes in the kernel for the next user
(keys), reach into other processes, or are large, rarely used ways into the kernel. Standard library only: it is a part of every sandbox.
"""

from __future__ import annotations

import ctypes
import os
import struct

__all__ = ["forbid_calls"]

# Of x86-64 and of AArch64, as in asm/unistd.h; the last of each row have one number everywhere.
_EVERYWHERE = (425, 426, 427, 438, 447)  # io_uring_setup, io_uring_enter, io_uring_register, pidfd_getfd, memfd_secret
_FORBIDDEN = {
    # memfd_create, shmget, semget, msgget, add_key, request_key, keyctl, ptrace, process_vm_readv, process_vm_writev, bpf,
    # perf_event_open, userfaultfd, unshare, setns, mount
    "x86_64": (0xC000003E, (319, 29, 64, 68, 248, 249, 250, 101, 310, 311, 321, 298, 323, 272, 308, 165)),
    "aarch64": (0xC00000B7, (279, 194, 190, 186, 217, 218, 219, 117, 270, 271, 280, 241, 282, 97, 268, 40)),
}
_OTHER_TABLE = 0x40000000  # numbers from here on are x86-64's second table (x32)
_PR_SET_SECCOMP, _MODE_FILTER = 22, 2
_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_NUMBER, _ARCHITECTURE = 0, 4  # offsets in struct seccomp_data
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050001  # the latter with EPERM


def forbid_calls() -> bool:
    """Refuse these calls to this process and all that it makes, for good; false where the machine has no filter for it.

    The process must have given up new privileges (PR_SET_NO_NEW_PRIVS).
    """
    known = _FORBIDDEN.get(os.uname().machine)
    if known is None:
        return False
    architecture, numbers = known
    program = _program(architecture, sorted({*numbers, *_EVERYWHERE}))
    buffer = ctypes.create_string_buffer(program)
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))  # struct sock_fprog
    return bool(ctypes.CDLL(None).prctl(_PR_SET_SECCOMP, _MODE_FILTER, header, 0, 0) == 0)


def _program(architecture: int, numbers: list[int]) -> bytes:
    """Instructions of struct sock_filter: another architecture's calls, another table's and those of `numbers` go to the last."""
    rows = [(_LOAD, 0, 0, _ARCHITECTURE), (_JUMP_EQUAL, 1, 0, architecture), (_RETURN, 0, 0, _REFUSE)]
    rows += [(_LOAD, 0, 0, _NUMBER), (_JUMP_AT_LEAST, len(numbers) + 1, 0, _OTHER_TABLE)]
    rows += [(_JUMP_EQUAL, len(numbers) - at, 0, number) for at, number in enumerate(numbers)]
    rows += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _REFUSE)]
    return b"".join(struct.pack("HBBI", *row) for row in rows)
