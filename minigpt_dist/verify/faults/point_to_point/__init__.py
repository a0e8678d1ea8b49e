"""Faults of collectives made of sends: which slice goes where, in how many rounds, in what type, and who waits for whom."""

from minigpt_dist.verify.faults.point_to_point import all_reduce, shards, tree

__all__ = ["all_reduce", "shards", "tree"]
