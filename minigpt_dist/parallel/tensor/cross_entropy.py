"""Cross-entropy of logits that are cut along the vocabulary: no rank ever holds all logits of a token (Shoeybi et al. 2019, section 3).

Owns the loss and its gradient. Two small messages: the maximum of each token's logits, then the sum of their exponentials beside
the target's logit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from minigpt_dist.loss import HALVES
from minigpt_dist.parallel.collectives import Group, all_reduce_max, all_reduce_sum
from minigpt_dist.parallel.tensor.axis import TensorAxis
from minigpt_dist.parallel.tensor.vocabulary import VocabSlice


class _CrossEntropy(torch.autograd.Function):
    """(T, rows) logits of the tokens from `lo` on, (T,) targets, (T,) whether a target is here: to (T,) losses.

    loss = log(sum_j exp(z_j - max)) - (z_target - max); d loss / d z_j = softmax_j - [j is the target].
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, here: Tensor, lo: int, group: Group) -> Tensor:
        top = logits.new_full((len(targets),), -torch.inf) if logits.shape[1] == 0 else logits.amax(1)
        shifted = logits - all_reduce_max(top, group).unsqueeze(1)
        where = (here.nonzero()[:, 0], targets[here] - lo)
        sums = logits.new_zeros((2, len(targets)))
        sums[1, where[0]] = shifted[where]
        softmax = shifted.exp_()
        sums[0] = softmax.sum(1)
        all_reduce_sum(sums, group)
        softmax /= sums[0].unsqueeze(1)
        ctx.save_for_backward(softmax, *where)
        return sums[0].log() - sums[1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        softmax, rows, columns = ctx.saved_tensors
        grad = softmax * grads[0].unsqueeze(1)
        grad[rows, columns] -= grads[0][rows]
        return grad, None, None, None, None


def token_losses(logits: Tensor, targets: Tensor, owned: VocabSlice, axis: TensorAxis) -> Tensor:
    """Cross-entropy of each token, in nats: of `targets`' shape, the same on all ranks of the axis.

    Args:
        logits: (..., hi - lo), of the tokens that `owned` says are this rank's; 16-bit ones are computed with in float32.
        targets: (...) token ids of the whole vocabulary, equal on all ranks.

    ValueError, before anything is sent, for logits of another width (gathered ones, say) or ids outside of the vocabulary.
    """
    if logits.shape != (*targets.shape, owned.hi - owned.lo):
        wanted = (*targets.shape, owned.hi - owned.lo)
        raise ValueError(f"logits are {tuple(logits.shape)}, but should be {wanted}, those of this rank's tokens")
    flat, ids = logits.flatten(0, -2), targets.flatten()
    flat = flat.float() if flat.dtype in HALVES else flat
    here = owned.owns(ids)
    losses: Tensor = _CrossEntropy.apply(flat, ids, here, owned.lo, axis.group)  # type: ignore[no-untyped-call]  # torch's
    return losses.view(targets.shape)


def vocab_parallel_cross_entropy(logits: Tensor, targets: Tensor, owned: VocabSlice, axis: TensorAxis) -> Tensor:
    """The mean of `token_losses`: logits (B, S, hi - lo), targets (B, S)."""
    return token_losses(logits, targets, owned, axis).mean()
