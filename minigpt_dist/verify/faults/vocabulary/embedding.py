"""Faults of an embedding whose rows are cut over ranks: who looks up which token, and the head tied to it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from minigpt_dist.verify.faults.catalogue import Names, fault
from minigpt_dist.verify.faults.layers import ALONE, Embedding, pair, total


@fault(
    source="TTrace (arXiv 2506.09280), bug 1: the vocabulary-parallel embedding masks the wrong ids",
    needs="the first token of a shard that is not the first",
    check="tensor.embedding",
    stage="forward",
    rank=0,
    tensor="output",
    green=("tensor.column", "tensor.row"),
    equivalent=ALONE,
)
def embedding_mask_off_by_one_at_a_shards_edge() -> Names:
    """The first token of the next shard counts as a shard's own too, and its last row is added."""

    class Wrong(Embedding):
        def here(self, ids: Tensor) -> Tensor:
            return (ids >= self.lo) & (ids <= self.hi)

        def table(self) -> Tensor:
            return torch.cat([self.weight, self.weight[-1:]])

        def forward(self, ids: Tensor) -> Tensor:
            rows = torch.where(self.here(ids), ids - self.lo, 0)
            return self.leave(F.embedding(rows, self.table()) * self.here(ids)[..., None])

    return {"VocabParallelEmbedding": Wrong}


@fault(
    source="NVIDIA/Megatron-LM, VocabParallelEmbedding: what the mask of the output is for",
    needs="a token of another rank's",
    check="tensor.embedding",
    stage="forward",
    tensor="output",
    equivalent=ALONE,
)
def tokens_elsewhere_add_the_first_row() -> Names:
    """Token ids of other ranks become 0, and the row that this finds is not masked out."""

    class Wrong(Embedding):
        def forward(self, ids: Tensor) -> Tensor:
            return self.leave(F.embedding(torch.where(self.here(ids), ids - self.lo, 0), self.weight))

    return {"VocabParallelEmbedding": Wrong}


@fault(
    source="torch.distributed.nn.functional.all_reduce: its backward is a sum over ranks too",
    needs="a gradient of the table",
    check="tensor.embedding",
    stage="backward",
    tensor="gradient of weight",
    equivalent=ALONE,
)
def embedding_gradient_counts_once_a_rank() -> Names:
    """The sum over ranks is differentiated as a sum over ranks, so that the table's gradient is N times too large."""

    class Wrong(Embedding):
        def leave(self, part: Tensor) -> Tensor:
            return pair(part, total, total)

    return {"VocabParallelEmbedding": Wrong}


@fault(
    source="TTrace (arXiv 2506.09280), bug 5: tied embedding and head drift apart; NVIDIA/Megatron-LM#656",
    needs="an update, and a loss after it",
    check="tensor.tied",
    stage="forward",
    tensor="loss of step 2",
    green=("tensor.embedding", "tensor.column"),
)
def tied_head_drifts_from_the_embedding() -> Names:
    """The table that is looked up is a copy made at the start: what the head's update does to the weight is not seen."""

    class Wrong(Embedding):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.copy = nn.Parameter(self.weight.detach().clone())

        def table(self) -> Tensor:
            table = self.copy + (self.weight - self.weight.detach())
            return torch.cat([table, self.weight.new_zeros(1, self.weight.shape[1])])

    return {"VocabParallelEmbedding": Wrong}
