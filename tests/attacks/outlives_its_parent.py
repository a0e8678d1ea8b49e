"""Processes that take back the signal of their parent's death, leave session and group, close all, and adopt each other."""

# attacks: optimizer.plain

import ctypes
import os
import sys

import wrong
from wrong import *  # noqa: F403

libc = ctypes.CDLL(None)


class ZeroOptimizer(wrong.ZeroOptimizer):
    def step(self):
        for option, value in ((1, 0), (4, 0), (36, 1)):  # PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER
            libc.prctl(option, value)
        for _ in range(3):
            if os.fork() == 0:
                os.setsid()
                if os.fork() == 0:
                    os.setsid()
                    os.closerange(0, 64)
                    # the attack itself: a process that outlives all others for as long as it is let
                    os.execv(
                        sys.executable, [sys.executable, "-c", "import time; time.sleep(300)  # attack-left-behind"]
                    )
                os._exit(0)
