"""Ring or tree: the fewest bytes for large messages, the fewest rounds for small ones."""

from __future__ import annotations

from torch import Tensor

from minigpt_dist.parallel.p2p import ring, tree
from minigpt_dist.parallel.p2p.peers import Peers

# By `minigpt-dist bench collectives`, 4 ranks on 2 cores: tree 2.5, 2.8, 3.9 and 37 ms at 1 KiB, 256 KiB, 1 MiB and 16 MiB, ring 7.4, 7.6,
# 7.7 and 42 ms. Where ranks share cores the tree's fewer wake-ups win as long as was measured; where each rank has its own link,
# give a smaller one.
CROSSOVER_BYTES = 2**25

ALGORITHMS = ("auto", "ring", "tree")


def all_reduce(tensor: Tensor, peers: Peers, algorithm: str = "auto", crossover: int = CROSSOVER_BYTES) -> Tensor:
    """Sum `tensor`, contiguous, over ranks, in place, and return it.

    algorithm: "ring", "tree", or "auto": the tree below `crossover` bytes, the ring from there.
    """
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm is {algorithm!r}, but should be one of {', '.join(ALGORITHMS)}")
    if algorithm == "auto":
        algorithm = "tree" if tensor.nbytes < crossover else "ring"
    return ring.all_reduce(tensor, peers) if algorithm == "ring" else tree.all_reduce(tensor, peers)
