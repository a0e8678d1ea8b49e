"""Faults of ZeRO stage 3: parameters that are gathered too late, too seldom, from the wrong pieces, or not freed."""

from minigpt_dist.verify.faults.zero3 import lifetime, values

__all__ = ["lifetime", "values"]
