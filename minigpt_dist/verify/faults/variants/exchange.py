"""Correct variants of the exchange of gradients: other collectives, another order of the sum, other messages."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from minigpt_dist.verify.faults import base
from minigpt_dist.verify.faults.catalogue import Names
from minigpt_dist.verify.faults.variants.registry import variant


def _summing(how: Callable[[base.LessonZero, Tensor], Tensor]) -> Names:
    """The base with another reduction: `how(optimizer, flat)` gives this rank's slice of the sum."""

    class Zero(base.LessonZero):
        def reduce(self) -> Tensor:
            flat = self.flat_grads()
            return (how(self, flat) if self.world_size > 1 else self.cut(flat)) / self.world_size

    return {"ZeroOptimizer": Zero}


def _all_ranks(zero: base.LessonZero, flat: Tensor) -> list[Tensor]:
    """This rank's slice of every rank's gradient, in rank order."""
    parts = [torch.empty_like(flat) for _ in range(zero.world_size)]
    dist.all_gather(parts, flat)
    return [zero.cut(part) for part in parts]


@variant
def sum_in_rank_order() -> Names:
    """((g0 + g1) + g2) + ..."""

    def how(zero: base.LessonZero, flat: Tensor) -> Tensor:
        first, *rest = _all_ranks(zero, flat)
        for part in rest:
            first = first + part
        return first

    return _summing(how)


@variant
def sum_in_reverse() -> Names:
    """From the last rank to the first."""

    def how(zero: base.LessonZero, flat: Tensor) -> Tensor:
        *rest, last = _all_ranks(zero, flat)
        for part in reversed(rest):
            last = last + part
        return last

    return _summing(how)


@variant
def sum_as_a_tree() -> Names:
    """(g0 + g1) + (g2 + g3), and so on."""

    def how(zero: base.LessonZero, flat: Tensor) -> Tensor:
        parts = _all_ranks(zero, flat)
        while len(parts) > 1:
            parts = [torch.stack(parts[i : i + 2]).sum(0) for i in range(0, len(parts), 2)]
        return parts[0]

    return _summing(how)


@variant
def reduce_scatter_of_a_list() -> Names:
    """dist.reduce_scatter, slices as a list."""

    def how(zero: base.LessonZero, flat: Tensor) -> Tensor:
        dist.reduce_scatter(out := torch.empty_like(zero.master), list(flat.split(zero.chunk)))
        return out

    return _summing(how)


@variant
def reduce_scatter_of_a_tensor() -> Names:
    """dist.reduce_scatter_tensor."""

    def how(zero: base.LessonZero, flat: Tensor) -> Tensor:
        dist.reduce_scatter_tensor(out := torch.empty_like(zero.master), flat)
        return out

    return _summing(how)


@variant
def all_to_all_and_sum() -> Names:
    """Slices change places, then each rank sums what it received."""

    def how(zero: base.LessonZero, flat: Tensor) -> Tensor:
        dist.all_to_all_single(received := torch.empty_like(flat), flat)
        return received.view(zero.world_size, -1).sum(0)

    return _summing(how)


@variant
def gather_on_a_root_and_scatter() -> Names:
    """Rank 0 sums everything and hands out slices."""

    def how(zero: base.LessonZero, flat: Tensor) -> Tensor:
        dist.reduce(flat, dst=0)
        dist.scatter(out := torch.empty_like(zero.master), list(flat.split(zero.chunk)) if zero.rank == 0 else None)
        return out

    return _summing(how)


@variant
def divide_before_the_sum() -> Names:
    """Each rank divides its own gradient by N first."""

    class Zero(base.LessonZero):
        def reduce(self) -> Tensor:
            flat = self.flat_grads() / self.world_size
            if self.world_size > 1:
                dist.all_reduce(flat)
            return self.cut(flat)

    return {"ZeroOptimizer": Zero}


@variant
def reduce_in_buckets() -> Names:
    """The flat gradient travels in pieces of 1000 elements, all in flight at once, from the last to the first."""

    def how(zero: base.LessonZero, flat: Tensor) -> Tensor:
        for work in [dist.all_reduce(piece, async_op=True) for piece in reversed(flat.split(1000))]:
            work.wait()
        return zero.cut(flat)

    return _summing(how)
