"""Faults with parameters that have no gradient: on every rank, on one, at first, or no more."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from minigpt_dist.verify.faults.base import LessonZero
from minigpt_dist.verify.faults.catalogue import Names, fault


@fault(
    source="NVIDIA/Megatron-LM PR 4609, a gradient buffer that is not zeroed",
    needs="a parameter used at first and then no more",
    check="optimizer.unused_later",
    stage="reduce",
    step=3,
    tensor="p0",
    green=("optimizer.plain", "optimizer.unused"),
)
def unused_parameter_meets_its_old_gradient() -> Names:
    """A parameter without a gradient leaves what the last step put into its place in the buffer."""

    class Zero(LessonZero):
        def flat_grads(self) -> Tensor:
            if not hasattr(self, "_buffer"):
                self._buffer = torch.zeros(self.chunk * self.world_size)
            offset = 0
            for p in self.params():
                if p.grad is not None:
                    self._buffer[offset : offset + p.numel()] = p.grad.flatten()
                offset += p.numel()
            return self._buffer.clone()

    return {"ZeroOptimizer": Zero}


@fault(
    source="our own stage 1 with one line changed, which the judge did not notice: the mark of a missing gradient is not taken back",
    needs="a step without zero_grad after one in which a parameter had no gradient",
    check="optimizer.keep_grads",
    stage="reduce",
    step=2,
    tensor="p1",
    green=("optimizer.plain", "optimizer.unused", "optimizer.unused_on_one"),
)
def mark_of_a_missing_gradient_stays() -> Names:
    """step() marks gradients that are missing, and the next backward adds to the mark."""

    class Zero(LessonZero):
        def reduce(self) -> Tensor:
            missing = [p for p in self.params() if p.grad is None]
            mean = super().reduce()
            for p in missing:
                p.grad = torch.ones_like(p)
            return mean

    return {"ZeroOptimizer": Zero}


@fault(
    source="pytorch/pytorch#128949",
    needs="a parameter unused on one rank",
    check="optimizer.unused_on_one",
    stage="reduce",
    green=("optimizer.plain",),
    hangs=True,
)
def unused_parameter_hangs() -> Names:
    """Gradients are reduced tensor by tensor where there is one: a rank without it leaves the others waiting."""

    class Zero(LessonZero):
        def reduce(self) -> Tensor:
            for p in self.params():
                if p.grad is not None and self.world_size > 1:
                    whole = p.grad.contiguous()
                    dist.all_reduce(whole)
                    p.grad = whole / self.world_size
            return self.cut(self.flat_grads())

    return {"ZeroOptimizer": Zero}


@fault(
    source="pytorch/pytorch#128949, the silent form",
    needs="a parameter without a gradient",
    check="optimizer.unused",
    stage="reduce",
    step=1,
    green=("optimizer.plain",),
    equivalent=((1, "there is nothing to reduce"),),
)
def unused_parameter_stops_its_bucket() -> Names:
    """A bucket is reduced once all its gradients have come; an unused parameter leaves the whole bucket unreduced."""

    class Zero(LessonZero):
        def reduce(self) -> Tensor:
            if all(p.grad is not None for p in self.params()):
                return super().reduce()
            return self.cut(self.flat_grads())

    return {"ZeroOptimizer": Zero}


@fault(
    source="dividing by the ranks that took part",
    needs="a parameter unused on one rank",
    check="optimizer.unused_on_one",
    stage="reduce",
    step=1,
    tensor="p2",
    green=("optimizer.plain",),
)
def unused_rank_left_out_of_the_mean() -> Names:
    """The sum is divided by the number of ranks that had a gradient, not by all."""

    class Zero(LessonZero):
        def reduce(self) -> Tensor:
            took_part = self.padded([torch.full_like(p, float(p.grad is not None)) for p in self.params()])
            if self.world_size > 1:
                dist.all_reduce(took_part)
            return super().reduce() * self.world_size / self.cut(took_part).clamp(min=1)

    return {"ZeroOptimizer": Zero}


@fault(
    source="NVIDIA-NeMo/Automodel#2468, an empty batch instead of a bad one",
    needs="a rank without any gradient",
    check="optimizer.idle_rank",
    stage="reduce",
    green=("optimizer.plain", "optimizer.unused_on_one"),
    equivalent=((1, "a step without gradients changes nothing"),),
    hangs=True,
)
def idle_rank_returns_early() -> Names:
    """A rank without gradients leaves step() before the exchange."""

    class Zero(LessonZero):
        def step(self) -> None:
            if any(p.grad is not None for p in self.params()):
                super().step()

    return {"ZeroOptimizer": Zero}


@fault(
    source="buckets laid out after the first backward (torch DDP rebuilds its buckets then)",
    needs="a parameter idle at first steps",
    check="optimizer.unused_once",
    stage="optimizer",
    step=3,
    tensor="p2",
    green=("optimizer.plain", "optimizer.unused"),
)
def parameters_of_the_first_step_only() -> Names:
    """What has no gradient at the first step is taken for unused, and left out for good."""

    class Zero(LessonZero):
        def flat_grads(self) -> Tensor:
            self.used = getattr(self, "used", [p.grad is not None for p in self.params()])
            for p, used in zip(self.params(), self.used, strict=True):
                if not used:
                    p.grad = None
            return super().flat_grads()

    return {"ZeroOptimizer": Zero}
