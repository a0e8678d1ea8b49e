"""Starting ranks: what a test that needs a world pays before and beyond its own work.

Owns the least useful job, one all-reduce, and the limits.
"""

from __future__ import annotations

import torch

from minigpt_dist.bench.comparison import Comparison
from minigpt_dist.bench.interleave import interleaved
from minigpt_dist.launch import World, run_world
from minigpt_dist.parallel.collectives import all_reduce_sum

FRESH, POOLED = "run_world: fresh ranks, start to result", "World.run: ranks that wait for jobs"
LIMITS = {FRESH: 0.15, POOLED: 0.010}


def all_reduce_body() -> float:
    return float(all_reduce_sum(torch.ones(1)))


def compare_launches(world_size: int, rounds: int, deadline_s: float) -> Comparison:
    """A world for one all-reduce and one all-reduce on a standing world, in turns."""
    with World(world_size, deadline_s=deadline_s) as pool:
        actions = {
            FRESH: lambda: run_world(all_reduce_body, world_size, deadline_s=deadline_s),
            POOLED: lambda: pool.run(all_reduce_body),
        }
        seconds = interleaved(actions, rounds)
    return Comparison(f"One all-reduce, {world_size} ranks, {rounds} rounds", seconds, limits=LIMITS)
