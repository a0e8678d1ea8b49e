"""Tensor-parallel layers as plain classes built from whole weights: the names by which the suite judges them.

Owns that shape: (whole weights, world_size, rank), as a lesson writes it, in place of a layer and an axis. Leaves all work to the layers.
Every class and function takes `group`, the ranks that share the layer (default: the world), and raises ValueError, before anything is sent,
where (world_size, rank) are not that group's, or where N does not divide what is cut. All ranks build and call them together.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from minigpt_dist.model import CausalSelfAttention
from minigpt_dist.parallel.collectives import Group, world
from minigpt_dist.parallel.tensor import linear, sequence, vocabulary
from minigpt_dist.parallel.tensor.attention import HeadParallelAttention
from minigpt_dist.parallel.tensor.axis import SEQUENCE, TensorAxis
from minigpt_dist.parallel.tensor.cross_entropy import token_losses
from minigpt_dist.parallel.tensor.operators import gather_sequence as gathered_sequence
from minigpt_dist.parallel.tensor.operators import scatter_sequence as scattered_sequence


class ColumnParallelLinear(linear.ColumnParallelLinear):
    """Rows [rank * out/N, (rank + 1) * out/N) of `weight` (out, in) and `bias` (out,): (..., in), equal on all ranks, to (..., out/N)."""

    def __init__(self, weight: Tensor, bias: Tensor | None, world_size: int, rank: int, group: Group = None) -> None:
        super().__init__(_linear(weight, bias), _axis(world_size, rank, group))


class RowParallelLinear(linear.RowParallelLinear):
    """Columns [rank * in/N, (rank + 1) * in/N) of `weight` (out, in): (..., in/N) to the whole product, `bias` (out,) added once."""

    def __init__(self, weight: Tensor, bias: Tensor | None, world_size: int, rank: int, group: Group = None) -> None:
        super().__init__(_linear(weight, bias), _axis(world_size, rank, group))


class VocabParallelEmbedding(vocabulary.VocabParallelEmbedding):
    """Rows from rank * ceil(V/N) on of `weight` (V, E), as many as that or what is left: token ids (...) to (..., E)."""

    def __init__(self, weight: Tensor, world_size: int, rank: int, group: Group = None) -> None:
        super().__init__(nn.Embedding.from_pretrained(weight), _axis(world_size, rank, group))


class ParallelAttention(HeadParallelAttention):
    """num_heads/N heads of causal attention with weights `qkv` (3E, E), three blocks, and `proj` (E, E): (B, S, E) to the same."""

    def __init__(
        self,
        qkv: Tensor,
        proj: Tensor,
        num_heads: int,
        world_size: int,
        rank: int,
        dropout: float = 0.0,
        group: Group = None,
    ) -> None:
        attention = CausalSelfAttention(proj.shape[0], num_heads, dropout)
        attention.qkv, attention.proj = _linear(qkv, None), _linear(proj, None)
        super().__init__(attention, _axis(world_size, rank, group))


def vocab_parallel_cross_entropy(
    logits: Tensor, targets: Tensor, vocab: int, world_size: int, rank: int, group: Group = None
) -> Tensor:
    """Losses (T,), in nats, of logits (T, this rank's tokens of `vocab`), cut as the embedding's rows, and targets (T,) of all tokens."""
    axis = _axis(world_size, rank, group)
    return token_losses(logits, targets, vocabulary.VocabSlice(vocab, axis), axis)


class SequenceLayerNorm(sequence.SequenceLayerNorm):
    """LayerNorm of this rank's positions (B, S/N, E), with whole `weight` and `bias` (E,), whose gradients are those of all positions."""

    def __init__(self, weight: Tensor, bias: Tensor, world_size: int, rank: int, group: Group = None) -> None:
        norm = nn.LayerNorm(len(weight))
        norm.weight, norm.bias = nn.Parameter(weight.clone()), nn.Parameter(bias.clone())
        super().__init__(norm, TensorAxis(_axis(world_size, rank, group).group, sequence_parallel=True))


def gather_sequence(x: Tensor, group: Group = None) -> Tensor:
    """(B, S/N, E) of every rank, in rank order, as (B, S, E); backward gives each its part of the gradients' sum."""
    return gathered_sequence(x, SEQUENCE, group)


def scatter_sequence(x: Tensor, group: Group = None) -> Tensor:
    """This rank's positions (B, S/N, E) of the sum over ranks of (B, S, E); backward gathers."""
    return scattered_sequence(x, SEQUENCE, group)


def _axis(world_size: int, rank: int, group: Group) -> TensorAxis:
    if (world_size, rank) != world(group):
        raise ValueError(
            f"(world_size, rank) is {(world_size, rank)}, but should be {world(group)}, as in the process group"
        )
    return TensorAxis(group)


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """The unsharded layer of these weights."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device=torch.device("meta"))
    layer.weight = nn.Parameter(weight)
    layer.register_parameter("bias", None if bias is None else nn.Parameter(bias))
    return layer
