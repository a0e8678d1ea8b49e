"""The conjugate operators of tensor parallelism: what one does to activations forward, its partner does backward.

Owns the pairs as autograd functions (Shoeybi et al. 2019, "Megatron-LM", section 3: f and g; Korthikanti et al. 2022, "Reducing
activation recomputation in large transformer models", section 4.2: g and g-bar for sequence parallelism). Leaves where in a model
they stand to the layers.

    operator              forward           backward          stands
    copy_to_region        identity          sum over ranks    before a column-parallel product
    reduce_from_region    sum over ranks    identity          after a row-parallel product
    scatter_to_region     own slice         all-gather        before a product that wants its input cut
    gather_from_region    all-gather        own slice         after a product whose output is wanted whole
    gather_sequence       all-gather        reduce-scatter    in place of copy_to_region, where the sequence is cut outside
    scatter_sequence      reduce-scatter    all-gather        in place of reduce_from_region, likewise

Every slice is even: a dimension that N does not divide is refused, on all ranks alike, before anything is sent.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from minigpt_dist.parallel.collectives import Group, all_gather_slices, all_reduce_sum, reduce_scatter_sum, world

Operator = Callable[[Tensor], Tensor]


class _Conjugate(torch.autograd.Function):
    """`there` on the way forward, `back` on the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Operator, back: Operator) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(grads[0]), None, None


def _conjugate(x: Tensor, there: Operator, back: Operator, group: Group) -> Tensor:
    if world(group)[0] == 1:
        return x
    out: Tensor = _Conjugate.apply(x, there, back)  # type: ignore[no-untyped-call]  # torch leaves it unannotated
    return out


def _same(x: Tensor) -> Tensor:
    return x.view_as(x)


def summed(x: Tensor, group: Group) -> Tensor:
    """The sum of `x` over ranks, the same bits on all of them; `x` is not modified."""
    return all_reduce_sum(x.clone(memory_format=torch.contiguous_format), group)


def own_slice(x: Tensor, dim: int, group: Group) -> Tensor:
    """This rank's of N equal parts of `x` along `dim`. ValueError where N does not divide it."""
    N, rank = world(group)
    size = even_share(x.shape[dim], N, f"size of dimension {dim}")
    return x.narrow(dim, rank * size, size).contiguous()


def joined(x: Tensor, dim: int, group: Group) -> Tensor:
    """All ranks' equal `x`, end to end along `dim` in rank order."""
    N, rank = world(group)
    first = x.movedim(dim, 0)
    whole = x.new_empty((N, *first.shape))
    whole[rank] = first
    all_gather_slices(whole.view(-1), [r * x.numel() for r in range(N + 1)], group)
    return whole.flatten(0, 1).movedim(0, dim).contiguous()


def summed_slice(x: Tensor, dim: int, group: Group) -> Tensor:
    """This rank's of N equal parts, along `dim`, of the sum of `x` over ranks, added in rank order."""
    N, _ = world(group)
    size = even_share(x.shape[dim], N, f"size of dimension {dim}")
    first = x.movedim(dim, 0).contiguous()
    mine = reduce_scatter_sum(first.view(-1), [r * (x.numel() // N) for r in range(N + 1)], group)
    return mine.view(size, *first.shape[1:]).movedim(0, dim).contiguous()


def even_share(total: int, parts: int, what: str) -> int:
    """total / parts. ValueError, naming `what`, unless that is a whole number."""
    if total % parts:
        raise ValueError(f"{what} is {total}, but should be a multiple of {parts}, the tensor-parallel ranks")
    return total // parts


def copy_to_region(x: Tensor, group: Group = None) -> Tensor:
    """`x`, equal on all ranks, of which each will use all: its gradient is the sum of theirs."""
    return _conjugate(x, _same, partial(summed, group=group), group)


def reduce_from_region(x: Tensor, group: Group = None) -> Tensor:
    """The sum of the ranks' parts `x`; each part's gradient is the sum's."""
    return _conjugate(x, partial(summed, group=group), _same, group)


def scatter_to_region(x: Tensor, dim: int, group: Group = None) -> Tensor:
    """This rank's slice along `dim` of `x`, equal on all ranks."""
    return _conjugate(x, partial(own_slice, dim=dim, group=group), partial(joined, dim=dim, group=group), group)


def gather_from_region(x: Tensor, dim: int, group: Group = None) -> Tensor:
    """The ranks' slices `x` joined along `dim`, for a use that is the same on all ranks."""
    return _conjugate(x, partial(joined, dim=dim, group=group), partial(own_slice, dim=dim, group=group), group)


def gather_sequence(x: Tensor, dim: int, group: Group = None) -> Tensor:
    """The ranks' slices `x` joined along `dim`, for uses that differ between ranks: their gradients are summed."""
    return _conjugate(x, partial(joined, dim=dim, group=group), partial(summed_slice, dim=dim, group=group), group)


def scatter_sequence(x: Tensor, dim: int, group: Group = None) -> Tensor:
    """This rank's slice along `dim` of the sum of the ranks' parts `x`."""
    return _conjugate(x, partial(summed_slice, dim=dim, group=group), partial(joined, dim=dim, group=group), group)
