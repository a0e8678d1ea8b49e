"""Faults of the fully sharded wrapper: what is lost in the cut, gathered late or kept, or reduced to the wrong thing."""

from minigpt_dist.verify.faults.fsdp import equivalence, memory, run

__all__ = ["equivalence", "memory", "run"]
