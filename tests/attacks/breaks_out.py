"""Mounts, changes its root, its user and its limits, and makes namespaces."""

# needs: walls
# attacks: optimizer.plain

import contextlib
import ctypes
import os
import pathlib
import resource

from wrong import *  # noqa: F403

libc = ctypes.CDLL(None)
libc.mount(b"none", b"/", b"tmpfs", 0, None)
libc.umount2(b"/tmp", 2)
libc.unshare(0x10000000 | 0x20000)
for attempt in (
    lambda: os.setresuid(0, 0, 0),
    lambda: os.chroot("/"),
    lambda: resource.setrlimit(resource.RLIMIT_NPROC, (100_000, 100_000)),
    lambda: os.mknod("/tmp/disk", 0o60600, os.makedev(254, 0)),
    lambda: pathlib.Path("/proc/sys/kernel/core_pattern").write_text("|/bin/sh"),
):
    with contextlib.suppress(OSError, ValueError):
        attempt()
