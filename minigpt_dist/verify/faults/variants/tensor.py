"""Correct variants of layers that are cut over ranks: other collectives, padding, gradients written out."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from minigpt_dist.verify.faults.catalogue import Names
from minigpt_dist.verify.faults.layers import Column, CrossEntropy, Embedding, Row, cut, entropy_of, pair, same, total
from minigpt_dist.verify.faults.sequence_layers import Norm, ranks
from minigpt_dist.verify.faults.variants.registry import variant


def _gathered_sum(x: Tensor) -> Tensor:
    """The sum over ranks of what an all-gather brings, from the last rank to the first."""
    parts = [torch.empty_like(x) for _ in range(ranks()[0])]
    dist.all_gather(parts, x.contiguous())
    return torch.stack(parts[::-1]).sum(0)


def _two_halves(x: Tensor) -> Tensor:
    """The sum over ranks as a reduce-scatter and an all-gather."""
    N, _ = ranks()
    flat = torch.cat([x.flatten(), x.new_zeros(-x.numel() % N)])
    part = flat.new_empty(len(flat) // N)
    dist.reduce_scatter_tensor(part, flat)
    dist.all_gather_into_tensor(flat, part)
    return flat[: x.numel()].view_as(x)


def _layers(sum_: Any) -> Names:
    """Layers whose every sum is `sum_`."""

    class Wide(Column):
        def enter(self, x: Tensor) -> Tensor:
            return pair(x, same, sum_)

    class Narrow(Row):
        def leave(self, part: Tensor) -> Tensor:
            return pair(part, sum_, same)

    class Table(Embedding):
        def leave(self, part: Tensor) -> Tensor:
            return pair(part, sum_, same)

    return {"ColumnParallelLinear": Wide, "RowParallelLinear": Narrow, "VocabParallelEmbedding": Table}


@variant
def layers_sum_what_they_gather() -> Names:
    """Tensor-parallel layers without an all-reduce: all-gather, then a sum."""
    return _layers(_gathered_sum)


@variant
def layers_sum_in_two_halves() -> Names:
    """Tensor-parallel layers whose all-reduce is a reduce-scatter and an all-gather."""
    return _layers(_two_halves)


@variant
def row_bias_divided_by_the_ranks() -> Names:
    """Every rank adds an N-th of the row-parallel bias before the sum, and its gradient is multiplied by N."""

    class Narrow(Row):
        def forward(self, x: Tensor) -> Tensor:
            out = x @ self.weight.T
            if self.bias is not None:
                out = out + pair(self.bias, lambda bias: bias / self.world_size, same)
            return self.leave(out)

    return {"RowParallelLinear": Narrow}


@variant
def embedding_is_padded() -> Names:
    """Every rank holds ceil(V/N) rows, the last ones zeros."""

    class Table(Embedding):
        def __init__(self, weight: Tensor, world_size: int, rank: int) -> None:
            super().__init__(weight, world_size, rank)
            missing = -(-len(weight) // world_size) - len(self.weight)
            self.weight = nn.Parameter(torch.cat([self.weight.detach(), weight.new_zeros(missing, weight.shape[1])]))

        def forward(self, ids: Tensor) -> Tensor:
            here = self.here(ids)
            return self.leave(self.weight[torch.where(here, ids - self.lo, 0)] * here[..., None])

    return {"VocabParallelEmbedding": Table}


@variant
def loss_from_each_ranks_logsumexp() -> Names:
    """Ranks exchange the log of their own sums in place of a maximum, and the gradient is written out."""

    class Loss(CrossEntropy):
        def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
            own = logits.detach().logsumexp(1)
            if self.world_size > 1:
                parts = [torch.empty_like(own) for _ in range(self.world_size)]
                dist.all_gather(parts, own)
                own = torch.stack(parts).logsumexp(0)
            softmax = (logits.detach() - own[:, None]).exp()
            through = (logits * softmax).sum(1)  # whose gradient is the softmax
            mine = self.target(logits, targets)
            losses = own - total(mine)
            return losses + through - through.detach() - mine + mine.detach()

    return {"vocab_parallel_cross_entropy": entropy_of(Loss)}


@variant
def norm_weights_pass_through_a_copy() -> Names:
    """Weight and bias pass a function whose backward sums, at each use, in place of hooks."""

    class Copied(Norm):
        def shared(self, grad: Tensor) -> Tensor:
            return grad

        def forward(self, x: Tensor) -> Tensor:
            weight, bias = (pair(p, same, lambda grad: total(grad, self.group)) for p in (self.weight, self.bias))
            return F.layer_norm(x, weight.shape, weight, bias)

    return {"SequenceLayerNorm": Copied}


@variant
def positions_change_places() -> Names:
    """The gather's gradient travels as an all-to-all."""

    def back(grad: Tensor) -> Tensor:
        N, rank = ranks()
        pieces = [cut(grad, r, N, 1).contiguous() for r in range(N)]
        got = [torch.empty_like(pieces[rank]) for _ in range(N)]
        dist.all_to_all(got, pieces)
        return torch.stack(got).sum(0)

    def joined(x: Tensor) -> Tensor:
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(ranks()[0])]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, 1)

    return {"gather_sequence": lambda x: pair(x, joined, back)}
