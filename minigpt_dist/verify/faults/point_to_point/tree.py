"""Faults of the tree broadcast: its root, and how many messages its source sends."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from minigpt_dist.verify.faults import ring
from minigpt_dist.verify.faults.catalogue import Names, fault


@fault(
    source="hard-coded src=0 in many data-parallel wrappers",
    needs="a source other than rank 0",
    check="collectives.broadcast",
    stage="broadcast",
    rank=0,
)
def tree_has_rank_0_at_its_root() -> Names:
    """The source is ignored: rank 0's tensor reaches everybody."""
    return {"tree_broadcast": lambda tensor, src=0: ring.tree_broadcast(tensor, 0)}


@fault(
    source="broadcast as a loop over ranks",
    needs="four ranks, and bytes that are counted",
    check="collectives.traffic",
    stage="broadcast",
    rank=0,
    world_size=4,
    green=("collectives.broadcast",),
    equivalent=((2, "one child is a tree"), (3, "the tree's root has two children too")),
)
def tree_is_a_star() -> Names:
    """The source sends to every rank itself: N - 1 messages one after the other in place of log2 N."""

    def tree_broadcast(tensor: Tensor, src: int = 0) -> None:
        raw = tensor.view(-1).view(torch.uint8)
        for rank in range(dist.get_world_size() if tensor.numel() else 0):
            if rank != src and dist.get_rank() == src:
                dist.send(raw, rank)
            elif rank == dist.get_rank() != src:
                dist.recv(raw, src)

    return {"tree_broadcast": tree_broadcast}
