"""Prints without end, on both streams and past Python."""

# attacks: optimizer.plain

import os

import wrong
from wrong import *  # noqa: F403


class ZeroOptimizer(wrong.ZeroOptimizer):
    def step(self):
        for _ in range(400):
            os.write(1, b"99 passed in 0.01s\n" * 50_000)
            os.write(2, b"PASSED optimizer.plain\n" * 50_000)
