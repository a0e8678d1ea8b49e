"""Faults that models of particular shapes bring out: many tensors, equal ones, two dtypes, fewer elements than ranks."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import torch
import torch.distributed as dist
from torch import Tensor, nn

from minigpt_dist.verify.faults.base import LessonZero
from minigpt_dist.verify.faults.catalogue import Names, fault

GREEN = ("optimizer.plain",)


@fault(
    source="multi-tensor kernels that take so many tensors a launch",
    needs="more than ten tensors",
    check="optimizer.many_tensors",
    stage="optimizer",
    step=1,
    tensor="p10",
    green=GREEN,
)
def ten_tensors_a_launch() -> Names:
    """One launch updates ten tensors, and there is one launch."""

    class Zero(LessonZero):
        def params(self) -> Iterator[nn.Parameter]:
            return islice(super().params(), 10)

    return {"ZeroOptimizer": Zero}


@fault(
    source="state looked up by shape",
    needs="two tensors of equal shape",
    check="optimizer.memory",
    stage="optimizer",
    step=1,
    tensor="p1",
    green=GREEN,
)
def equal_shapes_taken_for_one() -> Names:
    """Parameters are kept by shape: of several that look alike only the first is optimized."""

    class Zero(LessonZero):
        def params(self) -> Iterator[nn.Parameter]:
            first: dict[torch.Size, nn.Parameter] = {}
            for p in super().params():
                first.setdefault(p.shape, p)
            return iter(first.values())

    return {"ZeroOptimizer": Zero}


@fault(
    source="buckets that are flushed when the next one starts, into the same memory",
    needs="more than one bucket",
    check="optimizer.buckets",
    stage="reduce",
    step=1,
    tensor="p0",
    green=GREEN,
    equivalent=((1, "there is nothing to reduce"),),
)
def full_buckets_are_not_sent() -> Names:
    """A full bucket makes room for the next one without being reduced; only the last bucket is."""

    class Zero(LessonZero):
        def reduce(self) -> Tensor:
            flat = self.flat_grads()
            if self.world_size > 1:
                last = flat[(self.total - 1) // 2048 * 2048 :]
                dist.all_reduce(last)
                last /= self.world_size
            return self.cut(flat)

    return {"ZeroOptimizer": Zero}


@fault(
    source="one flat buffer, of the first parameter's dtype",
    needs="parameters of two dtypes",
    check="optimizer.mixed",
    stage="optimizer",
    step=1,
    tensor="p1",
    green=GREEN,
)
def other_dtypes_left_out() -> Names:
    """Parameters of another dtype than the first one's are not optimized."""

    class Zero(LessonZero):
        def params(self) -> Iterator[nn.Parameter]:
            kind = next(super().params()).dtype
            return (p for p in super().params() if p.dtype is kind)

    return {"ZeroOptimizer": Zero}


@fault(
    source="a group of the ranks that own something",
    needs="more ranks than elements, more than one element",
    check="optimizer.two_elements",
    stage="reduce",
    world_size=3,
    step=2,
    tensor="p0",
    green=GREEN,
    equivalent=((1, "one rank owns everything"), (2, "every rank owns an element")),
)
def ranks_without_a_slice_do_not_count() -> Names:
    """What ranks that own nothing have computed is left out of the mean."""

    class Zero(LessonZero):
        def flat_grads(self) -> Tensor:
            flat = super().flat_grads()
            return flat if self.rank * self.chunk < self.total else torch.zeros_like(flat)

        def reduce(self) -> Tensor:
            owners = -(-self.total // self.chunk)
            return super().reduce() * self.world_size / owners

    return {"ZeroOptimizer": Zero}


@fault(
    source="decay applied to every parameter of the module",
    needs="a frozen parameter and weight decay",
    check="optimizer.frozen_decay",
    stage="optimizer",
    step=1,
    tensor="p1",
    green=(*GREEN, "optimizer.frozen", "optimizer.weight_decay"),
)
def frozen_parameters_decay() -> Names:
    """Weight decay shrinks parameters that do not require a gradient."""

    class Zero(LessonZero):
        @torch.no_grad()
        def step(self) -> None:
            super().step()
            for p in self.module.parameters():
                if not p.requires_grad:
                    p.mul_(1 - self.lr * self.weight_decay)

    return {"ZeroOptimizer": Zero}


@fault(
    source="`value or default`",
    needs="a beta of 0",
    check="optimizer.no_memory",
    stage="optimizer",
    step=2,
    tensor="p0",
    green=(*GREEN, "optimizer.betas"),
)
def beta_of_zero_taken_for_none() -> Names:
    """A beta of 0 counts as not given, and the default holds."""

    class Zero(LessonZero):
        def update(self, grad: Tensor) -> None:
            self.betas = (self.betas[0] or 0.9, self.betas[1] or 0.999)
            super().update(grad)

    return {"ZeroOptimizer": Zero}
