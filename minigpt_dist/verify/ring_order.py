"""The order in which gloo's ring adds numbers, modelled on one process without any communication.

Owns where the ring cuts a vector and which rank's summand comes first in each piece: what decides the bits of a float
sum over three ranks or more. Leaves to `peers/replay.py` which vectors a package hands to the ring.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

LARGEST_SEGMENT = 1 << 20  # bytes
SEGMENTS_A_RANK = 2  # at least: one is sent while the other is added


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def ring_bounds(numel: int, world_size: int, element_size: int = 4) -> list[int]:
    """The N+1 cuts of a vector of `numel` elements, in elements: rank r ends up with the sum of piece r.

    The vector is cut into equal segments of whole elements, at most 1 MiB, at least two a rank; a piece is the same number of segments for
    every rank. So the last pieces may be short, or empty.
    """
    size = numel * element_size
    segments = _round_up(max(-(-size // LARGEST_SEGMENT), SEGMENTS_A_RANK * world_size), world_size)
    segment = _round_up(-(-size // segments), element_size)
    piece = segments // world_size * segment // element_size
    return [min(rank * piece, numel) for rank in range(world_size + 1)]


def ring_sum(tensors: Sequence[Tensor]) -> Tensor:
    """The sum of one tensor a rank, with the bits of `all_reduce` and `reduce_scatter_tensor` on gloo: a new tensor.

    Piece c of the flattened tensors is added in the order c-1, c-2, ..., c: rank c adds its own last.
    Raises ValueError for no tensor, or tensors of different shape or dtype.
    """
    kinds = {(tuple(t.shape), t.dtype) for t in tensors}
    if len(kinds) != 1:
        raise ValueError(f"tensors are of {len(kinds)} shapes and dtypes, but should be of one")
    N = len(tensors)
    flat = [t.detach().reshape(-1) for t in tensors]
    bounds = ring_bounds(flat[0].numel(), N, flat[0].element_size())
    total = flat[0].clone()
    for c in range(N):
        piece = slice(bounds[c], bounds[c + 1])
        partial = flat[(c - 1) % N][piece].clone()
        for back in range(2, N + 1):
            partial += flat[(c - back) % N][piece]
        total[piece] = partial
    return total.view(tensors[0].shape)
