"""Clipping over a tensor axis: the norm of gradients of which some are cut over ranks, and others whole on every rank.

Owns that each element counts once. Leaves the scale to `clipping.py`, and the sum over data ranks to the optimizer's `global_norm.py`.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from minigpt_dist.parallel.clipping import Clipping
from minigpt_dist.parallel.collectives import Group, world
from minigpt_dist.parallel.model_axis import ModelAxis


def clip_sharded_grad_norm(
    sharded: Iterable[nn.Parameter], replicated: Iterable[nn.Parameter], max_norm: float, group: Group = None
) -> float:
    """Scale all gradients, in place, so that the 2-norm of the whole model's is at most `max_norm`; returns the norm before, on all ranks.

    sharded: parameters of which each rank of `group` holds another part. replicated: those that every rank holds whole, with equal
    gradients. Those without a gradient are left out. All ranks together.
    """
    parts, whole = ([p for p in params if p.grad is not None] for params in (sharded, replicated))
    axis = ModelAxis(group, whole if world(group)[1] else ())
    grads = [p.grad for p in (*parts, *whole) if p.grad is not None and axis.counts(p)]
    own = sum(float(torch.linalg.vector_norm(g, dtype=torch.float64)) ** 2 for g in grads)
    clipping = Clipping(float(axis.sum(torch.tensor(own, dtype=torch.float64))) ** 0.5, max_norm)
    for p in (*parts, *whole):
        if p.grad is not None:
            p.grad.mul_(clipping.scale)
    return clipping.norm
