"""The outcome of one measurement: rows of times, ours against each rival, goals.

Owns the statistics: medians, because a shared machine has outliers, and ratios taken within a round, because its load
changes between rounds. Leaves taking the times to `interleave`, printing to `cli/bench.py`.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from minigpt_dist.bench.interleave import Seconds


@dataclass(frozen=True)
class Comparison:
    """Times of several variants, one number a round, all from the same rounds.

    Args:
        title: what a call is, at which size.
        seconds: variant -> seconds a call, by round.
        ours: the variant that is held against the others; None where nothing is, only `limits`.
        goals: variant -> `ours` should take at most this times as long as it.
        limits: variant -> seconds that it should take at most.
    """

    title: str
    seconds: Seconds
    ours: str | None = None
    goals: Mapping[str, float] = field(default_factory=dict)
    limits: Mapping[str, float] = field(default_factory=dict)

    def median(self, variant: str) -> float:
        """Seconds a call, median over rounds."""
        return statistics.median(self.seconds[variant])

    def ratio(self, variant: str) -> float | None:
        """Our time over the variant's, median over rounds; None for ourselves, or where `ours` is None."""
        if self.ours is None or variant == self.ours:
            return None
        pairs = zip(self.seconds[self.ours], self.seconds[variant], strict=True)
        return statistics.median(mine / its for mine, its in pairs)

    def met(self, variant: str) -> bool | None:
        """Whether the variant's goal or limit is reached; None where it has neither."""
        ratio = self.ratio(variant)
        if variant in self.goals and ratio is not None:
            return ratio <= self.goals[variant]
        return self.median(variant) <= self.limits[variant] if variant in self.limits else None

    @property
    def missed(self) -> list[str]:
        """The variants whose goal or limit is not reached."""
        return [variant for variant in self.seconds if self.met(variant) is False]

    def to_dict(self) -> dict[str, Any]:
        """Plain data: title, ours, and a row a variant with every round's seconds."""
        rows = [
            {
                "variant": variant,
                "seconds": seconds,
                "median": self.median(variant),
                "ratio": self.ratio(variant),
                "goal": self.goals.get(variant),
                "limit": self.limits.get(variant),
                "met": self.met(variant),
            }
            for variant, seconds in self.seconds.items()
        ]
        return {"title": self.title, "ours": self.ours, "rows": rows}
