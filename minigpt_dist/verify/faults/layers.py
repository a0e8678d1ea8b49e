"""A seventh host for faults: correct tensor-parallel layers, all-reduces of whole tensors. It shares no code with `parallel/tensor`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

Way = Callable[[Tensor], Tensor]
ALONE = ((1, "one rank holds everything"),)


def total(x: Tensor, group: Any = None) -> Tensor:
    """The sum over ranks, in new memory."""
    out = x.detach().clone().contiguous()
    if dist.is_initialized():
        dist.all_reduce(out, group=group)
    return out


def same(x: Tensor) -> Tensor:
    return x.clone()


class _Pair(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Way, back: Way) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(grads[0].contiguous()), None, None


def pair(x: Tensor, there: Way, back: Way) -> Tensor:
    """`there(x)`, whose gradient is `back` of its own."""
    return _Pair.apply(x, there, back)  # type: ignore[no-untyped-call,no-any-return]  # torch leaves it unannotated


def cut(whole: Tensor, rank: int, world_size: int, dim: int = 0) -> Tensor:
    """Rank `rank`'s ceil(n/N) elements along `dim`, or what is left of them."""
    size = -(-whole.shape[dim] // world_size)
    start = min(rank * size, whole.shape[dim])
    return whole.narrow(dim, start, min(size, whole.shape[dim] - start)).clone()


class Column(nn.Module):
    def __init__(self, weight: Tensor, bias: Tensor | None, world_size: int, rank: int) -> None:
        super().__init__()
        self.world_size, self.rank = world_size, rank
        self.weight = nn.Parameter(self.part(weight))
        self.bias = None if bias is None else nn.Parameter(self.part(bias))

    def part(self, whole: Tensor) -> Tensor:
        return cut(whole, self.rank, self.world_size)

    def enter(self, x: Tensor) -> Tensor:
        return pair(x, same, total)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.enter(x), self.weight, self.bias)


class Row(nn.Module):
    def __init__(self, weight: Tensor, bias: Tensor | None, world_size: int, rank: int) -> None:
        super().__init__()
        self.world_size, self.rank = world_size, rank
        self.weight = nn.Parameter(cut(weight, rank, world_size, 1))
        self.bias = None if bias is None else nn.Parameter(bias.clone())

    def leave(self, part: Tensor) -> Tensor:
        return pair(part, total, same)

    def forward(self, x: Tensor) -> Tensor:
        out = self.leave(F.linear(x, self.weight))
        return out if self.bias is None else out + self.bias


class Embedding(nn.Module):
    def __init__(self, weight: Tensor, world_size: int, rank: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(cut(weight, rank, world_size))
        self.lo = min(rank * -(-len(weight) // world_size), len(weight))
        self.hi = self.lo + len(self.weight)

    def here(self, ids: Tensor) -> Tensor:
        return (ids >= self.lo) & (ids < self.hi)

    def table(self) -> Tensor:
        """The rows, and one of zeros, for tokens that are elsewhere."""
        return torch.cat([self.weight, self.weight.new_zeros(1, self.weight.shape[1])])

    def leave(self, part: Tensor) -> Tensor:
        return pair(part, total, same)

    def forward(self, ids: Tensor) -> Tensor:
        rows = torch.where(self.here(ids), ids - self.lo, self.hi - self.lo)
        return self.leave(F.embedding(rows, self.table()))


class CrossEntropy:
    """The loss, a step a method."""

    def __init__(self, vocab: int, world_size: int, rank: int) -> None:
        self.vocab, self.world_size, self.rank = vocab, world_size, rank
        size = -(-vocab // world_size)
        self.lo, self.hi = (min(r * size, vocab) for r in (rank, rank + 1))

    def top(self, logits: Tensor) -> Tensor:
        """The largest logit of each token, over all ranks."""
        own = logits.detach().amax(1) if logits.shape[1] else logits.new_full((len(logits),), -torch.inf)
        if dist.is_initialized():
            dist.all_reduce(own, op=dist.ReduceOp.MAX)
        return own

    def here(self, targets: Tensor) -> Tensor:
        return (targets >= self.lo) & (targets < self.hi)

    def target(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The logit of each target, zero where another rank has it."""
        if not logits.shape[1]:
            return logits.sum(1)
        column = (targets - self.lo).clamp(0, logits.shape[1] - 1)
        return torch.where(self.here(targets), logits.gather(1, column[:, None])[:, 0], 0.0)

    def summed(self, part: Tensor) -> Tensor:
        return pair(part, total, same)

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        shifted = logits - self.top(logits)[:, None]
        return self.summed(shifted.exp().sum(1)).log() - self.summed(self.target(shifted, targets))


def entropy_of(kind: type[CrossEntropy]) -> Callable[..., Tensor]:
    """The contract's function, of a class with the loss's steps."""

    def vocab_parallel_cross_entropy(logits: Tensor, targets: Tensor, vocab: int, world_size: int, rank: int) -> Tensor:
        return kind(vocab, world_size, rank)(logits, targets)

    return vocab_parallel_cross_entropy


class Attention(nn.Module):
    def __init__(
        self, qkv: Tensor, proj: Tensor, num_heads: int, world_size: int, rank: int, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.rank, self.world_size, self.dropout, self.size = rank, world_size, dropout, len(proj) // num_heads
        self.qkv = nn.Parameter(self.rows(qkv))
        self.proj = nn.Parameter(cut(proj, rank, world_size, 1))

    def rows(self, qkv: Tensor) -> Tensor:
        """Of q, k and v, one below the other, this rank's heads each."""
        return torch.cat([cut(block, self.rank, self.world_size) for block in qkv.chunk(3)])

    def split(self, x: Tensor) -> Tensor:
        """(B, S, heads/N * size) by heads: (B, heads/N, S, size)."""
        parts: Tensor = x.unflatten(2, (-1, self.size))
        return parts.transpose(1, 2)

    def own_stream(self) -> int:
        """What this rank's masks are seeded by; one number of the shared stream is used up."""
        return int(torch.randint(2**31, ())) + self.rank

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not (self.training and self.dropout):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        seed = self.own_stream()
        with torch.random.fork_rng([]):
            torch.manual_seed(seed)
            return F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=True)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = F.linear(pair(x, same, total), self.qkv).chunk(3, -1)
        out = self.attend(self.split(q), self.split(k), self.split(v))
        return pair(F.linear(out.transpose(1, 2).flatten(2), self.proj), total, same)


NAMES = {
    "ColumnParallelLinear": Column,
    "RowParallelLinear": Row,
    "VocabParallelEmbedding": Embedding,
    "vocab_parallel_cross_entropy": entropy_of(CrossEntropy),
    "ParallelAttention": Attention,
}
