"""Faults of the start: what does not reach every rank, or reaches it changed."""

from minigpt_dist.verify.faults.broadcast import delivery, module

__all__ = ["delivery", "module"]
