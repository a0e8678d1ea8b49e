"""The vocabulary cut over ranks: token embedding and language-model head, a slice of the tokens each (Shoeybi et al. 2019, section 3).

Owns which token is whose, and the padding of a vocabulary that N does not divide. Leaves the loss to `cross_entropy.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from minigpt_dist.cut import Cut
from minigpt_dist.parallel.tensor.axis import TensorAxis


class VocabSlice:
    """The tokens `lo` to `hi` - 1 that this rank of the axis owns: `rows` = ceil(vocab/N) of them, fewer or none on the last ranks."""

    def __init__(self, vocab: int, axis: TensorAxis) -> None:
        self.vocab, self.cut = vocab, Cut(0, vocab)
        self.rows = self.cut.chunk(axis.size)
        self.lo, self.hi = min(axis.rank * self.rows, vocab), min((axis.rank + 1) * self.rows, vocab)

    def owns(self, ids: Tensor) -> Tensor:
        """Which of the token ids are this rank's. ValueError, on all ranks alike, for ids outside of the vocabulary."""
        if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= self.vocab):
            raise ValueError(f"token ids are {int(ids.min())} to {int(ids.max())}, but should be 0 to {self.vocab - 1}")
        return (ids >= self.lo) & (ids < self.hi)


class VocabParallelEmbedding(nn.Module):
    """`embedding`, its rows cut over the axis: ids (B, S) to (B, S, E); with the sequence cut, to this rank's (B, S/N, E).

    Each token is looked up by the rank that owns it; the others add zeros. Rows of padding are zeros that no token reaches.
    """

    def __init__(self, embedding: nn.Embedding, axis: TensorAxis) -> None:
        super().__init__()
        self.axis, self.slice = axis, VocabSlice(embedding.num_embeddings, axis)
        self.cuts = {"weight": self.slice.cut}
        self.weight = nn.Parameter(self.slice.cut.part(embedding.weight.detach(), axis.size, axis.rank))

    def forward(self, ids: Tensor) -> Tensor:
        owned = self.slice.owns(ids)
        found = F.embedding(torch.where(owned, ids - self.slice.lo, 0), self.weight)
        return self.axis.leave(found * owned.unsqueeze(-1))


class VocabParallelHead(nn.Module):
    """`head`, its output features cut over the axis: (B, S, E) to the logits (B, S, hi - lo) of this rank's tokens, without padding.

    weight: that of the embedding's slice, if the two are tied.
    """

    def __init__(self, head: nn.Linear, axis: TensorAxis, weight: nn.Parameter | None = None) -> None:
        super().__init__()
        self.axis, self.slice = axis, VocabSlice(head.out_features, axis)
        self.cuts = {"weight": self.slice.cut}
        own = self.slice.cut.part(head.weight.detach(), axis.size, axis.rank) if weight is None else weight
        self.weight = own if isinstance(own, nn.Parameter) else nn.Parameter(own)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.axis.enter(x), self.weight[: self.slice.hi - self.slice.lo])
