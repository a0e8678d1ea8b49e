"""Ring algorithms: every rank talks to its two neighbours only, and each element crosses each link about once a phase.

N ranks, T bytes: reduce-scatter and all-gather send T(N-1)/N bytes a rank in N-1 rounds, all-reduce is the two in turn, 2T(N-1)/N:
no algorithm sends less (Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations").

Slice c starts at rank c-1 and travels downwards, c-2, c-3, ..., to its owner c, each adding its own: so it is summed in the order
c-1, c-2, ..., c (mod N), as gloo's ring does.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from minigpt_dist.parallel.p2p.peers import Peers

SEGMENT_BYTES = 2**19  # a slice travels in pieces of this size, so that adding one overlaps receiving the next


def cuts(numel: int, parts: int) -> list[int]:
    """parts+1 cuts of `numel` elements into nearly equal slices, larger ones first."""
    base, more = divmod(numel, parts)
    return [c * base + min(c, more) for c in range(parts + 1)]


def checked_bounds(bounds: Sequence[int], numel: int, size: int) -> list[int]:
    """`bounds` as a list. ValueError unless they are size+1 non-decreasing cuts from 0 to `numel`."""
    found = list(bounds)
    if len(found) != size + 1 or found[0] != 0 or found[-1] != numel or found != sorted(found):
        raise ValueError(f"bounds are {found}, but should be {size + 1} non-decreasing cuts from 0 to {numel}")
    return found


def flat(tensor: Tensor) -> Tensor:
    """`tensor` as one dimension of the same memory. ValueError if its layout does not allow that."""
    if not tensor.is_contiguous():
        raise ValueError(
            f"the tensor has strides {tensor.stride()} at shape {tuple(tensor.shape)}, but should be contiguous"
        )
    return tensor.detach().view(-1)


def all_reduce(tensor: Tensor, peers: Peers, bounds: Sequence[int] | None = None) -> Tensor:
    """Sum `tensor`, contiguous and of one shape and dtype on all ranks, in place, and return it. bounds: N+1 cuts into slices."""
    values = flat(tensor)
    bounds = cuts(values.numel(), peers.size) if bounds is None else checked_bounds(bounds, values.numel(), peers.size)
    _reduce_scatter(values, bounds, peers)
    _all_gather(values, bounds, peers)
    return tensor


def reduce_scatter(values: Tensor, bounds: Sequence[int], peers: Peers) -> Tensor:
    """This rank's slice, bounds[rank] to bounds[rank+1], of the sum of `values` (1-D, not modified) over ranks: new memory."""
    bounds = checked_bounds(bounds, values.numel(), peers.size)
    summed = flat(values).clone()
    _reduce_scatter(summed, bounds, peers)
    return summed[bounds[peers.rank] : bounds[peers.rank + 1]].clone()


def all_gather(values: Tensor, bounds: Sequence[int], peers: Peers) -> Tensor:
    """Fill `values` (1-D) on every rank, in place, and return it: slice bounds[r] to bounds[r+1] comes from rank r."""
    _all_gather(flat(values), checked_bounds(bounds, values.numel(), peers.size), peers)
    return values


def _reduce_scatter(values: Tensor, bounds: Sequence[int], peers: Peers) -> None:
    """Leave the sum of slice `rank` in it; the other slices hold partial sums."""
    N, rank = peers.size, peers.rank
    below, above = (rank - 1) % N, (rank + 1) % N
    width = max(bounds[c + 1] - bounds[c] for c in range(N))
    inbox = torch.empty(width, dtype=values.dtype, device=values.device)
    for k in range(N - 1):
        outgoing, arriving = _slice(values, bounds, rank + 1 + k), _slice(values, bounds, rank + 2 + k)
        landing = inbox[: arriving.numel()]
        sent = [(below, piece) for piece in _segments(outgoing)]
        posted = [peers.post([], [(above, piece)]) for piece in _segments(landing)]
        leaving = peers.post(sent, [])
        for receipt, own, other in zip(posted, _segments(arriving), _segments(landing), strict=True):
            receipt.wait()
            own += other
        leaving.wait()


def _all_gather(values: Tensor, bounds: Sequence[int], peers: Peers) -> None:
    N, rank = peers.size, peers.rank
    below, above = (rank - 1) % N, (rank + 1) % N
    for k in range(N - 1):
        peers.exchange(
            [(below, _slice(values, bounds, rank + k))],
            [(above, _slice(values, bounds, rank + 1 + k))],
        )


def _slice(values: Tensor, bounds: Sequence[int], c: int) -> Tensor:
    c %= len(bounds) - 1
    return values[bounds[c] : bounds[c + 1]]


def _segments(values: Tensor) -> Sequence[Tensor]:
    """Views of at most SEGMENT_BYTES each; none of an empty tensor."""
    return values.split(max(1, SEGMENT_BYTES // values.element_size())) if values.numel() else ()
