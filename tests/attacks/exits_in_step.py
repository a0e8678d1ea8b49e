"""Ends the process with status 0 in the middle of the work, at interpreter exit, and by SystemExit."""

# attacks: optimizer.plain

import atexit
import os
import sys

import wrong
from wrong import *  # noqa: F403

atexit.register(os._exit, 0)


class ZeroOptimizer(wrong.ZeroOptimizer):
    def step(self):
        sys.exit(0)
