"""Faults of precision: state that is rounded to save memory."""

from __future__ import annotations

from torch import Tensor

from minigpt_dist.verify.faults.base import LessonZero
from minigpt_dist.verify.faults.catalogue import Names, fault


@fault(
    source="NVIDIA/Model-Optimizer#2322",
    needs="parameters near one, small updates",
    check="optimizer.plain",
    stage="optimizer",
    tensor="p0",
)
def master_in_bfloat16() -> Names:
    """The master copy is rounded to bfloat16 after each update."""

    class Zero(LessonZero):
        def update(self, grad: Tensor) -> None:
            super().update(grad)
            self.master = self.master.bfloat16().float()

    return {"ZeroOptimizer": Zero}


@fault(
    source="half-precision optimizer state to save memory",
    needs="gradients with more than 8 significant bits",
    check="optimizer.plain",
    stage="optimizer",
    step=1,
    tensor="p0",
)
def moments_in_bfloat16() -> Names:
    """The moments are kept in bfloat16."""

    class Zero(LessonZero):
        def apply(self, first: Tensor, second: Tensor) -> None:
            for moment in (self.exp_avg, self.exp_avg_sq):
                moment.copy_(moment.bfloat16())
            beta1, beta2 = self.betas
            super().apply(self.exp_avg / (1 - beta1**self.step_count), self.exp_avg_sq / (1 - beta2**self.step_count))

    return {"ZeroOptimizer": Zero}
