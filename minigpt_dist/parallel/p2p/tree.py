"""Tree algorithms: log2(N) rounds, in which whole messages travel; the fewest rounds, at more bytes than a ring.

A binomial tree with rank `root` at its root (Thakur, Rabenseifner and Gropp 2005, "Optimization of collective communication
operations in MPICH"): in the round of distance d, the ranks below d (counted from the root) talk to those d above them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minigpt_dist.parallel.p2p.peers import Peers
from minigpt_dist.parallel.p2p.ring import flat


def broadcast(tensor: Tensor, src: int, peers: Peers) -> Tensor:
    """Overwrite `tensor`, contiguous, on every rank with rank `src`'s, in place, and return it. Sends T bytes a child."""
    if not 0 <= src < peers.size:
        raise ValueError(f"src is {src}, but should be a rank below {peers.size}")
    values = flat(tensor)
    parent, children = _family(peers, src)
    if parent is not None:
        peers.exchange([], [(parent, values)])
    for child in children:
        peers.exchange([(child, values)], [])
    return tensor


def all_reduce(tensor: Tensor, peers: Peers) -> Tensor:
    """Sum `tensor`, contiguous, over ranks, in place, and return it: up to rank 0, pair by pair, then down again."""
    values = flat(tensor)
    parent, children = _family(peers, 0)
    inbox = torch.empty_like(values) if children else values
    for child in reversed(children):  # the smallest distance first: that child has the fewest of its own to wait for
        peers.exchange([], [(child, inbox)])
        values += inbox
    if parent is not None:
        peers.exchange([(parent, values)], [])
    return broadcast(tensor, 0, peers)


def _family(peers: Peers, root: int) -> tuple[int | None, list[int]]:
    """The rank this one receives from, and those it sends to, the farthest first."""
    N = peers.size
    place = (peers.rank - root) % N
    lowest = place & -place if place else 1 << (N - 1).bit_length()
    distances = [1 << k for k in range((lowest - 1).bit_length()) if place + (1 << k) < N]
    children = [(place + d + root) % N for d in reversed(distances)]
    return (None if place == 0 else (place - lowest + root) % N), children
