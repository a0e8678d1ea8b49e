"""Faults of tensor-parallel products and attention: what is summed over ranks too often, too seldom, or not at all; who holds what."""

from minigpt_dist.verify.faults.tensor import linear, self_attention

__all__ = ["linear", "self_attention"]
