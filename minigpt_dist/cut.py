"""Cuts: which part of an unsharded parameter a tensor-parallel rank holds, and the way back.

Owns the arithmetic of parts and their padding. Leaves which parameter is cut how to the layers of `parallel/tensor/`, each of which says so
in `cuts`, and what a rank holds in all to `parts.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class Cut:
    """N equal parts of a parameter along `dim`, whose size is `length`.

    blocks: the dimension is this many blocks, one after the other, and each is cut (a fused query, key and value: 3), so that a part
    is itself made of as many blocks. A block that N does not divide is padded with zeros at its end.
    """

    dim: int
    length: int
    blocks: int = 1

    def __post_init__(self) -> None:
        if self.length % self.blocks:
            raise ValueError(f"length is {self.length}, but should be a multiple of the {self.blocks} blocks")

    def chunk(self, parts: int) -> int:
        """Size of a part of one block, padding included."""
        return -(-self.length // self.blocks // parts)

    def part(self, whole: Tensor, parts: int, index: int) -> Tensor:
        """Part `index` of `parts`, in memory of its own."""
        size = self.length // self.blocks
        blocks = whole.unflatten(self.dim, (self.blocks, size)).movedim((self.dim, self.dim + 1), (0, 1))
        padded = F.pad(blocks, (0, 0) * (blocks.dim() - 2) + (0, self.chunk(parts) * parts - size))
        mine = padded[:, index * self.chunk(parts) : (index + 1) * self.chunk(parts)]
        return mine.movedim((0, 1), (self.dim, self.dim + 1)).flatten(self.dim, self.dim + 1).clone()

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The whole from all parts in order, without the padding: the inverse of `part`."""
        pieces = [p.unflatten(self.dim, (self.blocks, self.chunk(len(parts)))) for p in parts]
        whole = torch.cat(pieces, self.dim + 1).narrow(self.dim + 1, 0, self.length // self.blocks)
        return whole.flatten(self.dim, self.dim + 1)
