"""Faults of mixed precision: the loss scale's place and its rule, steps that some ranks skip, and the master copy."""

from minigpt_dist.verify.faults.mixed import gradients, overflow, state

__all__ = ["gradients", "overflow", "state"]
