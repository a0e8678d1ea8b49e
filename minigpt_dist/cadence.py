"""When to write a checkpoint: every so many steps, every so many minutes, and at the same step on all ranks.

Owns the moment. Ranks' clocks differ, so rank 0's decides; it is asked only where minutes are.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from minigpt_dist.parallel.collectives import Group, exchange, world


class Cadence:
    """Due after every `steps` completed steps, or once `minutes` have passed since the last checkpoint, or both; 0: never for that reason.

    Args:
        steps, minutes: numbers of at least 0.
        clock: seconds, for rank 0's decision; only differences count.

    Raises ValueError for anything else.
    """

    def __init__(
        self, steps: int = 0, minutes: float = 0.0, group: Group = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        if type(steps) is not int or steps < 0:
            raise ValueError(f"steps is {steps!r}, but should be a whole number of at least 0")
        if not (minutes >= 0 and math.isfinite(minutes)):
            raise ValueError(f"minutes is {minutes!r}, but should be a finite number of at least 0")
        self.steps, self.minutes = steps, minutes
        self._group, self._clock = group, clock
        self._last = clock()

    def due(self, step: int) -> bool:
        """Is a checkpoint to be written after `step`? All ranks ask together, after every step, and get one answer."""
        due = self.steps > 0 and step % self.steps == 0
        if self.minutes > 0:
            _, rank = world(self._group)
            late = rank == 0 and self._clock() - self._last >= 60 * self.minutes
            due = due or exchange(bytes([late]), self._group)[0] == b"\1"
        if due:
            self._last = self._clock()
        return due
