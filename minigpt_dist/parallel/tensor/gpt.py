"""MiniGPT cut over ranks by layers' insides: the same model, its layers replaced one for one by their tensor-parallel partners.

Owns which layer becomes which, and the way back to whole parameters and gradients. The model's own `forward` stays as it is, and names
stay what they were, so a checkpoint, a pipeline's cut and a comparison with the unsharded model find everything where it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import cast

import torch
from torch import Tensor, nn

from minigpt_dist.cut import Cut
from minigpt_dist.model import Block, MiniGPT
from minigpt_dist.parallel.collectives import Group
from minigpt_dist.parallel.ddp import broadcast_parameters
from minigpt_dist.parallel.tensor.attention import HeadParallelAttention
from minigpt_dist.parallel.tensor.axis import TensorAxis
from minigpt_dist.parallel.tensor.cross_entropy import vocab_parallel_cross_entropy
from minigpt_dist.parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear
from minigpt_dist.parallel.tensor.operators import even_share, joined
from minigpt_dist.parallel.tensor.sequence import SequenceLayerNorm, SequencePositions
from minigpt_dist.parallel.tensor.streams import RankDropout
from minigpt_dist.parallel.tensor.vocabulary import VocabParallelEmbedding, VocabParallelHead


def tensor_parallel(model: MiniGPT, group: Group = None, *, sequence_parallel: bool = False) -> MiniGPT:
    """Cut `model`, in place, over the ranks of `group`: attention by heads, MLP by columns and rows, embedding and head by vocabulary.

    Each rank keeps its part of the weights of the group's first rank, so the start is that of the unsharded model of one seed, whatever
    the number of ranks. All ranks of the group call it together, before an optimizer is built, and with equal arguments.

    Args:
        model: unsharded, of equal sizes on all ranks.
        sequence_parallel: cut what is outside of the regions (LayerNorm, dropout, residuals) along the sequence, which N must divide.

    Returns the model: token ids (B, S) to this rank's logits (B, S, its tokens), for `token_loss`.
    ValueError, before anything is sent or changed, where N does not divide the heads or the MLP's width, or if it is cut already.
    """
    axis = TensorAxis(group, sequence_parallel)
    if not isinstance(model.head, nn.Linear):
        raise ValueError("the model is cut over ranks already, but should be unsharded")
    blocks = cast(list[Block], list(model.blocks))
    for block in blocks:
        even_share(block.attn.num_heads, axis.size, "num_heads")
        even_share(cast(nn.Linear, block.mlp[0]).out_features, axis.size, "the MLP's width")
    broadcast_parameters(model, group=group)
    tied = model.head.weight is model.tok_embed.weight
    embedding = VocabParallelEmbedding(model.tok_embed, axis)
    head = VocabParallelHead(model.head, axis, embedding.weight if tied else None)
    model.register_module("tok_embed", embedding)
    model.register_module("head", head)
    for block in blocks:
        _cut_block(block, axis)
    if sequence_parallel:
        model.register_module("pos_embed", SequencePositions(model.pos_embed, axis))
        model.register_module("ln_f", SequenceLayerNorm(model.ln_f, axis))
    return model


def _cut_block(block: Block, axis: TensorAxis) -> None:
    block.register_module("attn", HeadParallelAttention(block.attn, axis))
    block.mlp.register_module("0", ColumnParallelLinear(cast(nn.Linear, block.mlp[0]), axis))
    block.mlp.register_module("2", RowParallelLinear(cast(nn.Linear, block.mlp[2]), axis))
    if axis.sequence_parallel:
        for name in ("ln1", "ln2"):
            block.register_module(name, SequenceLayerNorm(getattr(block, name), axis))
        block.register_module("drop", RankDropout(block.drop.p, axis))


def token_loss(model: nn.Module, logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of what a cut model returned, in nats a token, equal on all ranks of the axis; targets (B, S)."""
    head = model.head
    assert isinstance(head, VocabParallelHead)
    return vocab_parallel_cross_entropy(logits, targets, head.slice, head.axis)


def cuts_of(model: nn.Module) -> dict[str, tuple[Cut, TensorAxis]]:
    """Name -> cut and axis of every parameter of which this rank holds a part; the others are whole on every rank."""
    found: dict[str, tuple[Cut, TensorAxis]] = {}
    for prefix, module in model.named_modules():
        cuts, axis = getattr(module, "cuts", {}), getattr(module, "axis", None)
        if isinstance(axis, TensorAxis):
            found.update({f"{prefix}.{name}": (cut, axis) for name, cut in cuts.items()})
    return found


def replicated_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that every rank of the axis holds whole: LayerNorms, biases of row-parallel layers, positions."""
    cuts = cuts_of(model)
    return [p for name, p in model.named_parameters() if name not in cuts]


def whole(
    model: nn.Module, tensor_of: Callable[[nn.Parameter], Tensor | None] = lambda p: p.detach()
) -> Iterator[tuple[str, Tensor]]:
    """Every parameter by name as the unsharded model would hold it, or what else `tensor_of` says of it (its gradient).

    All ranks of the axis consume it together; a None is left out, on all ranks or on none.
    """
    cuts = cuts_of(model)
    for name, p in model.named_parameters():
        tensor = tensor_of(p)
        if tensor is None:
            continue
        if name in cuts:
            cut, axis = cuts[name]
            tensor = cut.join(joined(tensor.unsqueeze(0), 0, axis.group).unbind(0))
        yield name, tensor


def whole_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Name -> gradient, whole, of every parameter that has one. All ranks of the axis call it together."""
    with torch.no_grad():
        return dict(whole(model, lambda p: p.grad))
