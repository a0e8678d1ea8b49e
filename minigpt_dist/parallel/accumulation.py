"""Gradient accumulation: micro-batches that together weigh as one large batch, whatever their sizes.

Owns the weights. A mean over all tokens is not the mean of the means: a micro-batch counts by its tokens, over all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from minigpt_dist.parallel.collectives import Group, all_reduce_sum, world


def token_weights(tokens: Sequence[int], group: Group = None) -> list[float]:
    """What to multiply each micro-batch's mean loss by, so that the mean over ranks of the summed gradients is that of all tokens' mean.

    Args:
        tokens: targets that count, for each of this rank's micro-batches of one step; ranks may have different numbers of them.

    Returns tokens[m] * N / T, with N ranks and T tokens over all of them: equal micro-batches get 1/M. All ranks call it together.
    ValueError, on all ranks, for negative counts or for no token at all.
    """
    known = all(type(n) is int and n >= 0 for n in tokens)
    sums = all_reduce_sum(torch.tensor([sum(tokens) if known else 0, int(not known)], dtype=torch.int64), group)
    total, wrong = sums.tolist()
    if wrong:
        raise ValueError(f"tokens are {list(tokens)} here, but should be whole numbers of at least 0 on every rank")
    if total == 0:
        raise ValueError("tokens are 0 on all ranks, but should be some")
    N, _ = world(group)
    return [n * N / total for n in tokens]
