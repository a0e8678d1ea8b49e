"""Waits for a writer that never comes, with every signal blocked, in a call that Python cannot end."""

# attacks: optimizer.plain

import os
import signal
import tempfile

import wrong
from wrong import *  # noqa: F403


class ZeroOptimizer(wrong.ZeroOptimizer):
    def step(self):
        path = os.path.join(tempfile.mkdtemp(), "pipe")
        os.mkfifo(path)
        signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals))
        os.open(path, os.O_RDONLY)
