"""Faults of state_dict and load_state_dict: what is not in them, not restored, restored twice, or changed by being asked for."""

from minigpt_dist.verify.faults.state import load, save

__all__ = ["load", "save"]
