"""Drift: numbers of a step that are far from what they were in the steps before.

Owns the rule. It is one rank's own: nothing is exchanged, and nothing is decided for the run (`guard.py` does that).
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

WINDOW, LEAST = 16, 4  # steps that a usual value is the median of, at most and at least
LOSS, NORM = 1.5, 4.0


@dataclass
class Drift:
    """Compares each number with the median of its last values: the loss only upwards, the others both ways.

    limits: name -> the factor from which on a number is flagged; names in `both_ways` also below one over it.
    """

    limits: Mapping[str, float] = field(default_factory=lambda: {"loss": LOSS, "grad_norm": NORM, "update_ratio": NORM})
    both_ways: frozenset[str] = frozenset({"grad_norm", "update_ratio"})
    _seen: dict[str, deque[float]] = field(default_factory=dict)

    def flags(self, numbers: Mapping[str, float]) -> dict[str, float]:
        """Name -> value over usual value, of those that are flagged; infinite for a number that is not finite. Remembers the others.

        A flagged number is remembered too, if it is finite: what stays becomes usual.
        """
        found = {}
        for name, value in numbers.items():
            seen = self._seen.setdefault(name, deque(maxlen=WINDOW))
            usual = statistics.median(seen) if len(seen) >= LEAST else 0.0
            if not math.isfinite(value):
                found[name] = math.inf
                continue
            factor, limit = value / usual if usual > 0 else 1.0, self.limits[name]
            if factor > limit or (name in self.both_ways and factor < 1 / limit):
                found[name] = factor
            seen.append(value)
        return found
