"""All-reduce by ring and by tree, from sends, beside the backend's own: where is the crossover, and what does writing it in Python cost?

Owns the sizes and the goals. Leaves the algorithms to `parallel/p2p/`.
"""

from __future__ import annotations

from functools import partial

import torch

from minigpt_dist.bench.comparison import Comparison
from minigpt_dist.bench.interleave import Seconds, interleaved, slowest
from minigpt_dist.launch import run_world
from minigpt_dist.parallel.collectives import all_reduce_sum, barrier
from minigpt_dist.parallel.p2p import Peers, all_reduce, ring, tree

BYTES = (2**10, 2**16, 2**18, 2**20, 2**24)
OURS, BACKEND = "ours, auto", "gloo's own all_reduce"
GOAL = {BACKEND: 1.3}  # from 1 MiB; below it the figure is a few wake-ups of sleeping ranks
LEAST_BYTES_WITH_A_GOAL = 2**20


def all_reduce_body(nbytes: int, rounds: int, calls: int) -> Seconds:
    """On each rank: the same message by every algorithm, in turns."""
    peers, message = Peers(), torch.zeros(nbytes // 4)
    actions = {
        OURS: partial(all_reduce, message, peers),
        "ring": partial(ring.all_reduce, message, peers),
        "tree": partial(tree.all_reduce, message, peers),
        BACKEND: partial(all_reduce_sum, message),
    }
    return interleaved(actions, rounds, calls, warm_up=3, before=barrier)


def compare_all_reduces(nbytes: int, world_size: int, rounds: int, deadline_s: float) -> Comparison:
    """One size: `rounds` rounds, with more calls a turn the smaller the message."""
    calls = 2 if nbytes > 2**20 else 10
    ranks = run_world(all_reduce_body, world_size, nbytes, rounds, calls, deadline_s=deadline_s)
    goals = GOAL if nbytes >= LEAST_BYTES_WITH_A_GOAL else {}
    title = f"All-reduce of {nbytes // 1024:,} KiB, {world_size} ranks, {rounds} rounds of {calls} calls"
    return Comparison(title, slowest(ranks), OURS, goals)
