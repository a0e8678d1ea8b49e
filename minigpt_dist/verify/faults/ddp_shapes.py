"""Faults of the data-parallel wrapper that models of particular shapes bring out: one tensor, many, empty ones, two dtypes, buffers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice, takewhile
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from minigpt_dist.verify.faults.catalogue import Names, fault
from minigpt_dist.verify.faults.wrapper import LessonDDP

PLAIN = ("ddp.plain",)


class _Chosen(LessonDDP):
    """Averages the gradients of `params()` alone."""

    def params(self) -> Iterator[nn.Parameter]:
        return (p for p in self.module.parameters() if p.requires_grad)

    def sync_grads(self) -> None:
        for p in self.params():
            p.grad = self.average(torch.zeros_like(p) if p.grad is None else p.grad)


_FIRST = {"stage": "reduce", "step": 1, "rank": 0, "green": PLAIN}


@fault(
    source="a bucket that is sent when the next tensor does not fit",
    needs="a single tensor",
    check="ddp.one_tensor",
    tensor="p0",
    **_FIRST,
)
def ddp_sends_when_a_second_tensor_comes() -> Names:
    """Sending starts with the second tensor: a model of one never sends."""

    class Wrapper(_Chosen):
        def params(self) -> Iterator[nn.Parameter]:
            found = list(super().params())
            return iter(found if len(found) > 1 else ())

    return {"DistributedDataParallel": Wrapper}


@fault(
    source="multi-tensor copies that take so many tensors a launch",
    needs="more than ten tensors",
    check="ddp.many_tensors",
    tensor="p10",
    **_FIRST,
)
def ddp_averages_ten_tensors() -> Names:
    """The table of tensors to average has ten places."""

    class Wrapper(_Chosen):
        def params(self) -> Iterator[nn.Parameter]:
            return islice(super().params(), 10)

    return {"DistributedDataParallel": Wrapper}


@fault(
    source="`break` for `continue`", needs="a tensor without elements", check="ddp.empty_tensor", tensor="p2", **_FIRST
)
def ddp_stops_at_an_empty_tensor() -> Names:
    """A tensor without elements ends the loop over parameters instead of being passed over."""

    class Wrapper(_Chosen):
        def params(self) -> Iterator[nn.Parameter]:
            return takewhile(torch.Tensor.numel, super().params())

    return {"DistributedDataParallel": Wrapper}


@fault(
    source="one flat buffer, of the first parameter's dtype",
    needs="parameters of two dtypes",
    check="ddp.mixed",
    tensor="p1",
    **_FIRST,
)
def ddp_leaves_out_other_dtypes() -> Names:
    """Gradients of another dtype than the first parameter's are not averaged."""

    class Wrapper(_Chosen):
        def params(self) -> Iterator[nn.Parameter]:
            kind = next(super().params()).dtype
            return (p for p in super().params() if p.dtype is kind)

    return {"DistributedDataParallel": Wrapper}


@fault(
    source="a mean over the ranks that took part",
    needs="a parameter used on some ranks only",
    check="ddp.unused_on_one",
    tensor="p2",
    **_FIRST,
)
def ddp_divides_by_the_ranks_that_used_it() -> Names:
    """A parameter's gradients are divided by the number of ranks that had one, not by all."""

    class Wrapper(LessonDDP):
        def sync_grads(self) -> None:
            for p in self.module.parameters():
                if p.requires_grad:
                    used = torch.tensor([float(p.grad is not None)])
                    if self.world_size > 1:
                        dist.all_reduce(used)
                    mean: Tensor = self.average(torch.zeros_like(p) if p.grad is None else p.grad)
                    p.grad = mean * (self.world_size / max(float(used), 1.0))

    return {"DistributedDataParallel": Wrapper}


@fault(
    source="parameters() alone at construction",
    needs="a buffer that differs between ranks",
    check="ddp.buffers",
    stage="broadcast",
    step=0,
    rank=1,
    tensor="running",
    green=PLAIN,
)
def ddp_does_not_copy_buffers() -> Names:
    """Construction copies parameters and leaves buffers as they are."""

    class Wrapper(LessonDDP):
        def start(self) -> None:
            for p in self.module.parameters():
                whole = p.detach().contiguous()
                dist.broadcast(whole, src=0)
                p.detach().copy_(whole)

    return {"DistributedDataParallel": Wrapper}


@fault(
    source="forward(self, *args)",
    needs="a keyword argument",
    check="ddp.forward",
    stage="forward",
    step=0,
    rank=0,
    green=PLAIN,
)
def ddp_drops_keyword_arguments() -> Names:
    """forward hands on what is given by position and drops what is given by name."""

    class Wrapper(LessonDDP):
        def forward(self, *args: Any, **options: Any) -> Any:
            return self.module(*args)

    return {"DistributedDataParallel": Wrapper}


@fault(
    source="a mutable class attribute",
    needs="two wrappers in one process",
    check="ddp.two_wrappers",
    tensor="p0",
    **_FIRST,
)
def ddp_wrappers_share_their_list() -> Names:
    """The list of parameters to average is the class's: the wrapper built last has replaced everyone's."""

    class Wrapper(_Chosen):
        known: ClassVar[list[nn.Parameter]] = []

        def start(self) -> None:
            super().start()
            self.known[:] = super().params()

        def params(self) -> Iterator[nn.Parameter]:
            return iter(self.known)

    return {"DistributedDataParallel": Wrapper}
