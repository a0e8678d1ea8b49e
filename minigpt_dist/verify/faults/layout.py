"""Faults of cutting and joining: who owns which element, what is padding, whose slice goes where."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from minigpt_dist.verify.faults.base import LessonZero
from minigpt_dist.verify.faults.catalogue import Names, fault

NO_PADDING = ((1, "there is no padding"),)


@fault(
    source="the lesson's own padding, off by one",
    needs="P not divisible by N",
    check="optimizer.remainder_one",
    stage="reduce",
    step=1,
    tensor="p0",
    green=("optimizer.divisible",),
    equivalent=NO_PADDING,
)
def last_element_gets_the_pad() -> Names:
    """The slice that ends in padding loses its last real element's gradient."""

    class Zero(LessonZero):
        def flat_grads(self) -> Tensor:
            flat = super().flat_grads()
            if flat.numel() > self.total:
                flat[self.total - 1] = 0
            return flat

    return {"ZeroOptimizer": Zero}


@fault(
    source="P // N in place of a ceiling",
    needs="P not divisible by N",
    check="optimizer.remainder_one",
    stage="reduce",
    step=1,
    tensor="p0",
    green=("optimizer.divisible",),
    equivalent=NO_PADDING,
)
def remainder_never_updated() -> Names:
    """Slices have P // N elements; what remains at the end belongs to nobody."""

    class Zero(LessonZero):
        def padded(self, parts: list[Tensor]) -> Tensor:
            self.chunk = self.total // self.world_size
            return torch.cat([t.detach().float().flatten() for t in parts])[: self.chunk * self.world_size]

        def write_back(self, flat: Tensor) -> None:
            rest = torch.cat([p.detach().float().flatten() for p in self.params()])[flat.numel() :]
            super().write_back(torch.cat([flat, rest]))

    return {"ZeroOptimizer": Zero}


@fault(
    source="slicing with flat[:-pad]",
    needs="P divisible by N",
    check="optimizer.divisible",
    stage="optimizer",
    green=("optimizer.remainder_one",),
)
def no_padding_means_everything_is_padding() -> Names:
    """The padding is cut off by flat[:-pad], which is empty where pad is 0."""

    class Zero(LessonZero):
        def gather(self) -> Tensor:
            return super().gather()[: -(self.chunk * self.world_size - self.total)]

    return {"ZeroOptimizer": Zero}


@fault(
    source="pytorch/pytorch#108869",
    needs="more ranks than parameters",
    check="optimizer.tiny",
    stage="optimizer",
    green=("optimizer.plain",),
    equivalent=((1, "every rank owns something"),),
)
def more_ranks_than_parameters() -> Names:
    """A rank whose slice is all padding raises."""

    class Zero(LessonZero):
        def cut(self, flat: Tensor) -> Tensor:
            if self.rank * self.chunk >= self.total:
                raise IndexError(f"rank {self.rank} owns no parameter")
            return super().cut(flat)

    return {"ZeroOptimizer": Zero}


@fault(
    source="pytorch/pytorch#108869, the waiting form",
    needs="more ranks than parameters",
    check="optimizer.tiny",
    stage="gather",
    green=("optimizer.plain",),
    equivalent=((1, "every rank owns something"),),
    hangs=True,
)
def empty_rank_skips_the_exchange() -> Names:
    """A rank that owns nothing does not come to the gather, and the others wait."""

    class Zero(LessonZero):
        def gather(self) -> Tensor:
            if self.rank * self.chunk >= self.total:
                return torch.zeros(self.chunk * self.world_size)
            return super().gather()

    return {"ZeroOptimizer": Zero}


@fault(
    source="offset counted twice",
    needs="nothing",
    check="optimizer.plain",
    stage="reduce",
    step=1,
    tensor="p0",
)
def gradients_shifted_by_one() -> Names:
    """The flat gradient is one element ahead of the flat parameters."""

    class Zero(LessonZero):
        def flat_grads(self) -> Tensor:
            flat = super().flat_grads()
            return torch.cat([flat[1:], flat.new_zeros(1)]) if flat.numel() else flat

    return {"ZeroOptimizer": Zero}


@fault(
    source="reversed parameter order in one of two places (DDP buckets are reversed)",
    needs="more than one tensor",
    check="optimizer.plain",
    stage="reduce",
    step=1,
    tensor="p0",
    green=("optimizer.tiny",),
)
def gradients_in_reversed_order() -> Names:
    """Gradients are laid out in reversed parameter order, parameters in declaration order."""

    class Zero(LessonZero):
        def flat_grads(self) -> Tensor:
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.params()]
            flat = torch.cat([t.detach().float().flatten() for t in grads]).flip(0)
            return torch.cat([flat, flat.new_zeros(self.chunk * self.world_size - flat.numel())])

    return {"ZeroOptimizer": Zero}


@fault(
    source="NVIDIA/Megatron-LM#663, NVIDIA/Megatron-LM#565",
    needs="more than one tensor",
    check="optimizer.plain",
    stage="optimizer",
    step=1,
    tensor="p5",
    green=("optimizer.one_tensor",),
)
def parameter_outside_the_flat_buffer() -> Names:
    """Scalars are not put into the flat buffer, and so never updated."""

    class Zero(LessonZero):
        def params(self) -> Iterator[nn.Parameter]:
            everything = list(super().params())
            return (p for p in everything if p.dim() > 0 or len(everything) <= 2)

    return {"ZeroOptimizer": Zero}


@fault(
    source="loops that end at the first empty tensor",
    needs="a tensor without elements",
    check="optimizer.empty_tensor",
    stage="optimizer",
    step=1,
    tensor="p2",
    green=("optimizer.plain",),
)
def stops_at_an_empty_tensor() -> Names:
    """Parameters after one without elements are left out."""

    class Zero(LessonZero):
        def params(self) -> Iterator[nn.Parameter]:
            for p in super().params():
                if not p.numel():
                    return
                yield p

    return {"ZeroOptimizer": Zero}


@fault(
    source="bucket caps in elements",
    needs="a tensor of more than 65,536 elements",
    check="optimizer.large",
    stage="optimizer",
    step=1,
    tensor="p0",
    green=("optimizer.plain",),
)
def only_the_first_bucket_is_updated() -> Names:
    """Of a slice, only the first 32,768 elements are updated."""

    class Zero(LessonZero):
        def apply(self, first: Tensor, second: Tensor) -> None:
            whole, self.master = self.master, self.master[:32_768]
            super().apply(first[:32_768], second[:32_768])
            self.master = whole

    return {"ZeroOptimizer": Zero}


@fault(
    source="kernels launched over at most 2^20 elements",
    needs="a slice of more than 2^20 elements",
    check="optimizer.huge",
    stage="optimizer",
    step=1,
    tensor="p0",
    green=("optimizer.plain", "optimizer.large"),
)
def only_the_first_mebi_is_updated() -> Names:
    """Of a slice, only the first 2^20 elements are updated."""

    class Zero(LessonZero):
        def apply(self, first: Tensor, second: Tensor) -> None:
            whole, most = self.master, 1 << 20
            self.master = whole[:most]
            super().apply(first[:most], second[:most])
            self.master = whole

    return {"ZeroOptimizer": Zero}
