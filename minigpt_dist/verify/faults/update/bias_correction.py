"""Faults of Adam's step count and of the bias correction that reads it."""

from __future__ import annotations

import torch
from torch import Tensor

from minigpt_dist.verify.faults.base import LessonZero
from minigpt_dist.verify.faults.catalogue import Names, fault


@fault(
    source="NVIDIA/Megatron-LM#5976",
    needs="nothing",
    check="optimizer.plain",
    stage="optimizer",
    step=1,
    tensor="p0",
)
def dummy_step_counts() -> Names:
    """State is made by a dummy step that already counts, so the first update is corrected as the second."""

    class Zero(LessonZero):
        def update(self, grad: Tensor) -> None:
            self.step_count += 1
            super().update(grad)
            self.step_count -= 1

    return {"ZeroOptimizer": Zero}


@fault(
    source="counting after the update", needs="nothing", check="optimizer.plain", stage="optimizer", step=1, tensor="p0"
)
def first_step_counts_as_zero() -> Names:
    """The counter moves after the update: 1 - beta**0 is a division by zero at the first step."""

    class Zero(LessonZero):
        def update(self, grad: Tensor) -> None:
            self.step_count -= 1
            beta1, beta2 = self.betas
            self.exp_avg.mul_(beta1).add_(grad, alpha=1 - beta1)
            self.exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
            done = torch.tensor(float(self.step_count))
            self.apply(self.exp_avg / (1 - beta1**done), self.exp_avg_sq / (1 - beta2**done))
            self.step_count += 1

    return {"ZeroOptimizer": Zero}


@fault(
    source="deepspeedai/DeepSpeed#1823",
    needs="a shard processed in chunks, at an early step",
    check="optimizer.plain",
    stage="optimizer",
    step=1,
    tensor="p0",
)
def shared_step_counter_across_subgroups() -> Names:
    """The shard is updated in two chunks, and one shared counter moves with each: the second chunk is corrected as of a later step."""

    class Zero(LessonZero):
        calls = 0

        def update(self, grad: Tensor) -> None:
            whole, half = (self.master, self.exp_avg, self.exp_avg_sq), self.master.numel() // 2
            count = self.step_count
            for part in (slice(0, half), slice(half, None)):
                self.calls += 1
                self.step_count = self.calls
                self.master, self.exp_avg, self.exp_avg_sq = (t[part] for t in whole)
                super().update(grad[part])
            (self.master, self.exp_avg, self.exp_avg_sq), self.step_count = whole, count

    return {"ZeroOptimizer": Zero}


@fault(
    source="Oneflow-Inc/oneflow#5960",
    needs="nothing",
    check="optimizer.plain",
    stage="optimizer",
    step=1,
    tensor="p0",
)
def bias_correction_default_off() -> Names:
    """The moments are used without bias correction."""

    class Zero(LessonZero):
        def apply(self, first: Tensor, second: Tensor) -> None:
            super().apply(self.exp_avg, self.exp_avg_sq)

    return {"ZeroOptimizer": Zero}


@fault(
    source="Adam from scratch, one correction forgotten",
    needs="nothing",
    check="optimizer.plain",
    stage="optimizer",
    step=1,
    tensor="p0",
)
def second_moment_not_corrected() -> Names:
    """Only the first moment is corrected for its bias."""

    class Zero(LessonZero):
        def apply(self, first: Tensor, second: Tensor) -> None:
            super().apply(first, self.exp_avg_sq.clone())

    return {"ZeroOptimizer": Zero}
