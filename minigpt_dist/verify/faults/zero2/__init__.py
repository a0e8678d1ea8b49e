"""Faults of ZeRO stage 2: gradients that are summed, freed, forgotten or divided at the wrong moment."""

from minigpt_dist.verify.faults.zero2 import accumulation, memory, slices

__all__ = ["accumulation", "memory", "slices"]
