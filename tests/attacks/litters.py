"""Leaves files of every kind where all may write, and objects of the kernel that no process holds."""

# attacks: optimizer.plain

import contextlib
import ctypes
import os
import socket
import tempfile

from wrong import *  # noqa: F403

libc, name = ctypes.CDLL(None), f"attack-file-{os.getpid()}"
for key in range(0x61747400, 0x61747403):
    libc.shmget(key, 1 << 20, 0o1600), libc.msgget(key, 0o1600), libc.semget(key, 3, 0o1600)
for place in dict.fromkeys((tempfile.gettempdir(), "/tmp", "/var/tmp", "/dev/shm", "/run/lock")):
    with contextlib.suppress(OSError):
        os.mkfifo(f"{place}/{name}-pipe")
        socket.socket(socket.AF_UNIX).bind(f"{place}/{name}-socket")
        os.symlink("/etc/passwd", f"{place}/{name}-link")
        for i in range(100):
            with open(f"{place}/{name}-{i}", "wb") as file:
                file.truncate(1 << 24)
