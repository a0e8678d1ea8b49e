"""The tensor axis: the ranks that share each layer of one replica, and how activations and parameters meet them.

Owns the choice between the two ways to lay out what is outside of a tensor-parallel region: whole on every rank, or cut along the
sequence. Leaves the operators themselves to `operators.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from minigpt_dist.parallel.collectives import Group, world
from minigpt_dist.parallel.tensor.operators import (
    copy_to_region,
    gather_sequence,
    reduce_from_region,
    scatter_sequence,
)

SEQUENCE = 1  # of activations (B, S, E)


@dataclass(frozen=True)
class TensorAxis:
    """The ranks of `group`. sequence_parallel: outside of regions, does each rank hold S/N of the S positions?"""

    group: Group = None
    sequence_parallel: bool = False

    @property
    def size(self) -> int:
        return world(self.group)[0]

    @property
    def rank(self) -> int:
        return world(self.group)[1]

    def enter(self, x: Tensor) -> Tensor:
        """Activations on their way into a region: (B, S, E), or (B, S/N, E) with the sequence cut, to (B, S, E)."""
        if self.sequence_parallel:
            return gather_sequence(x, SEQUENCE, self.group)
        return copy_to_region(x, self.group)

    def leave(self, part: Tensor) -> Tensor:
        """Each rank's addend (B, S, E) on its way out: the sum, (B, S, E) or this rank's (B, S/N, E) of it."""
        if self.sequence_parallel:
            return scatter_sequence(part, SEQUENCE, self.group)
        return reduce_from_region(part, self.group)

    def replicated(self, *params: Tensor) -> tuple[Tensor, ...]:
        """Parameters that every rank holds whole, for use outside of a region: their gradients are those of the whole sequence.

        With the sequence cut, a rank's own backward knows S/N of the positions, so gradients are summed over ranks, in one message.
        That is done by autograd, for each use, rather than once a step: a gradient is then complete when it reaches its
        parameter, and whatever waits for it there (buckets, ZeRO-2, accumulation, recomputation) needs to know nothing of this axis.
        """
        if not self.sequence_parallel:
            return params
        packed = copy_to_region(torch.cat([p.flatten() for p in params]), self.group)
        parts = packed.split([p.numel() for p in params])
        return tuple(part.view(p.shape) for part, p in zip(parts, params, strict=True))
