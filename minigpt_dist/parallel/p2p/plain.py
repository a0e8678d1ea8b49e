"""The collectives as plain functions of one tensor, over all ranks: the names by which the suite judges them.

Owns how a tensor is cut where the caller does not say: nearly equal slices, the larger ones first. Leaves the algorithms to `ring` and
`tree`. All ranks call a function together. Raises SilentPeerError, naming the rank, where one keeps another waiting for `timeout` seconds,
and ValueError for a tensor that is not contiguous.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minigpt_dist.parallel.p2p import ring, tree
from minigpt_dist.parallel.p2p.peers import Peers

TIMEOUT_S = 60.0


def ring_all_reduce(tensor: Tensor, timeout: float = TIMEOUT_S) -> Tensor:
    """Sum `tensor`, of one shape and dtype on all ranks, in place, and return it. Sends 2T(N-1)/N bytes a rank."""
    return ring.all_reduce(tensor, Peers(timeout_s=timeout))


def reduce_scatter(tensor: Tensor, timeout: float = TIMEOUT_S) -> Tensor:
    """This rank's slice of the sum of `tensor` (1-D, not modified) over ranks. Sends T(N-1)/N bytes a rank."""
    peers = Peers(timeout_s=timeout)
    return ring.reduce_scatter(tensor, ring.cuts(tensor.numel(), peers.size), peers)


def all_gather(tensor: Tensor, timeout: float = TIMEOUT_S) -> Tensor:
    """All ranks' tensors (1-D, of any lengths), one after the other in rank order. Sends about T(N-1)/N bytes, and 8 a length."""
    peers = Peers(timeout_s=timeout)
    lengths = torch.zeros(peers.size, dtype=torch.int64)
    lengths[peers.rank] = tensor.numel()
    ring.all_gather(lengths, range(peers.size + 1), peers)
    bounds = [0, *lengths.cumsum(0).tolist()]
    whole = tensor.new_empty(bounds[-1])
    whole[bounds[peers.rank] : bounds[peers.rank + 1]] = tensor
    return ring.all_gather(whole, bounds, peers)


def tree_broadcast(tensor: Tensor, src: int = 0, timeout: float = TIMEOUT_S) -> Tensor:
    """Overwrite `tensor` on every rank with rank `src`'s, in place, and return it. No rank sends more than log2(N) times T bytes."""
    return tree.broadcast(tensor, src, Peers(timeout_s=timeout))
