"""Faults of how an optimizer is called, and with what: closures, frozen and tied parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from minigpt_dist.verify.faults.base import LessonZero
from minigpt_dist.verify.faults.catalogue import Names, fault
from minigpt_dist.verify.faults.grouped import GroupedZero

Closure = Callable[[], float] | None


@fault(
    source="step(closure=None) copied without the call",
    needs="a closure",
    check="optimizer.closure",
    stage="gather",
    step=1,
    tensor="p0",
    green=("optimizer.plain",),
)
def closure_never_called() -> Names:
    """step() takes a closure and does not evaluate it."""

    class Zero(GroupedZero):
        def evaluate(self, closure: Closure) -> float | None:
            return None

    return {"ZeroOptimizer": Zero}


@fault(
    source="a closure evaluated for the loss and again for the gradient",
    needs="a closure",
    check="optimizer.closure",
    stage="backward",
    step=1,
    tensor="p0",
    green=("optimizer.plain",),
)
def closure_called_twice() -> Names:
    """The closure is evaluated twice: its gradients add up."""

    class Zero(GroupedZero):
        def evaluate(self, closure: Closure) -> float | None:
            super().evaluate(closure)
            return super().evaluate(closure)

    return {"ZeroOptimizer": Zero}


@fault(
    source="step() without a return",
    needs="a closure",
    check="optimizer.closure",
    stage="optimizer",
    step=1,
    rank=0,
    green=("optimizer.plain",),
)
def closure_loss_not_returned() -> Names:
    """step(closure) returns None."""

    class Zero(GroupedZero):
        def evaluate(self, closure: Closure) -> float | None:
            super().evaluate(closure)
            return None

    return {"ZeroOptimizer": Zero}


@fault(
    source="TrainCheck C7, open-mmlab/mmpretrain#702: frozen stages that train",
    needs="a frozen parameter, weight decay or not",
    check="optimizer.frozen",
    stage="optimizer",
    step=1,
    tensor="p1",
    green=("optimizer.plain",),
)
def frozen_parameters_are_updated() -> Names:
    """requires_grad is not looked at: noise in the buffer moves frozen parameters."""

    class Zero(LessonZero):
        def params(self) -> Iterator[nn.Parameter]:
            return self.module.parameters()

        def flat_grads(self) -> Tensor:
            return self.padded([torch.full_like(p, 1e-3) if p.grad is None else p.grad for p in self.params()])

    return {"ZeroOptimizer": Zero}


@fault(
    source="NVIDIA/Megatron-LM#656, tied weights reduced once for each name",
    needs="a tied parameter",
    check="optimizer.tied",
    stage="reduce",
    step=1,
    tensor="p0",
    green=("optimizer.plain",),
    equivalent=((1, "a sum over one rank changes nothing"),),
)
def tied_parameter_reduced_twice() -> Names:
    """Gradients are summed over ranks in place, name by name: a tensor with two names is summed twice."""

    class Zero(LessonZero):
        def reduce(self) -> Tensor:
            for p in self.module.state_dict(keep_vars=True).values():
                if isinstance(p, nn.Parameter) and p.requires_grad and self.world_size > 1:
                    whole = torch.zeros_like(p) if p.grad is None else p.grad
                    dist.all_reduce(whole := whole.contiguous())
                    p.grad = whole
            return self.cut(self.flat_grads()) / self.world_size

    return {"ZeroOptimizer": Zero}


@fault(
    source="`if not self.own: return` at the top of step",
    needs="a closure, a rank that owns nothing",
    check="optimizer.closure_tiny",
    stage="backward",
    world_size=4,
    step=2,
    tensor="p0",
    green=("optimizer.plain", "optimizer.closure"),
    equivalent=((1, "one rank owns everything"),),
)
def closure_skipped_by_ranks_that_own_nothing() -> Names:
    """A rank that owns nothing joins the exchange, but does not evaluate the closure."""

    class Zero(GroupedZero):
        def evaluate(self, closure: Closure) -> float | None:
            owns = any(self.rank * -(-p.numel() // self.world_size) < p.numel() for _, p in self.members())
            return super().evaluate(closure) if owns else None

    return {"ZeroOptimizer": Zero}
