"""Ring or tree: the fewest bytes for large messages, the fewest rounds for small ones."""

from __future__ import annotations

from torch import Tensor

from minigpt_dist.parallel.p2p import ring, tree
from minigpt_dist.parallel.p2p.peers import Peers

CROSSOVER_BYTES = 2**16  # measured by `minigpt-dist bench collectives`

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
