"""Takes memory that no process has mapped, in nameless files and segments; a step that gets none is right."""

# needs: walls
# attacks: optimizer.plain

import contextlib
import ctypes
import os

import honest
from honest import *  # noqa: F403

taken = []
with contextlib.suppress(OSError):
    taken.append(os.memfd_create("taken"))
segment = ctypes.CDLL(None).shmget(0, 1 << 20, 0o1600)
if segment >= 0:
    taken.append(segment)


class ZeroOptimizer(honest.ZeroOptimizer):
    def step(self):
        if not taken:
            raise MemoryError("there is none to be had")
        super().step()
