"""Faults that wait: right for the first steps, and wrong once afterwards, as only a longer run shows."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from minigpt_dist.verify.faults.base import LessonZero
from minigpt_dist.verify.faults.catalogue import Names, fault

EARLY = ("optimizer.plain", "optimizer.long", "optimizer.reload")


@fault(
    source="loss spikes under a schedule built in (a one-step learning-rate multiplier)",
    needs="fifteen steps and a loss that is watched",
    check="monotone_loss",
    stage="optimizer",
    step=16,
    green=(*EARLY, "param_norms", "optimizer_bytes"),
)
def learning_rate_spikes_once() -> Names:
    """The fifteenth step is taken with thirty times the learning rate."""

    class Zero(LessonZero):
        def step(self) -> None:
            lr = self.lr
            self.lr = lr * 30 if self.step_count == 14 else lr
            super().step()
            self.lr = lr

    return {"ZeroOptimizer": Zero}


@fault(
    source="TrainCheck C1-C3, pytorch/pytorch#84803",
    needs="fifteen steps, and bytes compared between ranks at each",
    check="param_norms",
    stage="gather",
    step=15,
    rank=1,
    green=(*EARLY, "optimizer_bytes"),
    equivalent=((1, "nothing is received"),),
)
def gathered_message_lost_once() -> Names:
    """At the fifteenth step rank 1 receives zeros for rank 0's slice; the next step's gather mends it."""

    class Zero(LessonZero):
        def gather(self) -> Tensor:
            flat = super().gather()
            if (self.rank, self.step_count) == (1, 15):
                flat[: self.chunk] = 0
            return flat

    return {"ZeroOptimizer": Zero}


@fault(
    source="an optimizer re-created at an epoch's end",
    needs="fifteen steps and an oracle beside them",
    check="oracle",
    stage="forward",
    step=17,
    green=(*EARLY, "param_norms", "optimizer_bytes"),
)
def moments_dropped_at_an_epochs_end() -> Names:
    """After fifteen steps both moments start from zero, once."""

    class Zero(LessonZero):
        def update(self, grad: Tensor) -> None:
            if self.step_count == 16:
                self.exp_avg.zero_()
                self.exp_avg_sq.zero_()
            super().update(grad)

    return {"ZeroOptimizer": Zero}


@fault(
    source="buckets grown on demand and never given back",
    needs="a census of bytes in a run of the model itself",
    check="optimizer_bytes",
    stage="memory",
    rank=0,
    green=("optimizer.plain", "optimizer.sharded", "monotone_loss", "param_norms", "oracle"),
)
def full_copy_kept_for_larger_models() -> Names:
    """Where a parameter is a matrix, every rank keeps a full float32 copy of all parameters for the gather."""

    class Zero(LessonZero):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            if any(p.dim() > 1 for p in self.params()):
                self.staging = self.flat_params()

    return {"ZeroOptimizer": Zero}


@fault(
    source="an optimizer re-created when buckets are rebuilt (torch DDP rebuilds after its first backward)",
    needs="more than eight steps",
    check="optimizer.long",
    stage="optimizer",
    step=9,
    tensor="p0",
    green=("optimizer.plain",),
)
def state_dropped_at_a_rebuild() -> Names:
    """Once, after eight steps, everything is rebuilt, and moments and count start anew."""

    class Zero(LessonZero):
        def step(self) -> None:
            if self.step_count == 8 and not hasattr(self, "_rebuilt"):
                self._rebuilt, self.step_count = True, 0
                self.exp_avg.zero_()
                self.exp_avg_sq.zero_()
            super().step()

    return {"ZeroOptimizer": Zero}
