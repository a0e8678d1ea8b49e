"""Faults of the message: in what type gradients travel, when, and from which buffer."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from minigpt_dist.verify.faults.base import LessonZero
from minigpt_dist.verify.faults.catalogue import Names, fault

ONE_RANK = ((1, "one rank's gradient is the mean"),)


@fault(
    source="deepspeedai/DeepSpeed communication_data_type, precision of the reduction",
    needs="gradients with more than 8 significant bits",
    check="optimizer.plain",
    stage="reduce",
    step=1,
    tensor="p0",
    green=("param_norms", "optimizer_bytes"),
)
def gradients_travel_in_bfloat16() -> Names:
    """Gradients are reduced in bfloat16 although parameters and state are float32."""

    class Zero(LessonZero):
        def flat_grads(self) -> Tensor:
            return super().flat_grads().bfloat16().float()

    return {"ZeroOptimizer": Zero}


@fault(
    source="deepspeedai/DeepSpeed communication_data_type, range of the reduction",
    needs="gradients below 6e-8",
    check="optimizer.plain",
    stage="reduce",
    step=1,
    tensor="p0",
    green=("optimizer_bytes",),
)
def gradients_travel_in_float16() -> Names:
    """Gradients are reduced in float16: small ones become zero."""

    class Zero(LessonZero):
        def flat_grads(self) -> Tensor:
            return super().flat_grads().half().float()

    return {"ZeroOptimizer": Zero}


@fault(
    source="TrainCheck C1-C3, pytorch/pytorch#84803",
    needs="more than the first steps",
    check="optimizer.long",
    stage="reduce",
    step=7,
    tensor="p0",
    green=("optimizer.plain",),
    equivalent=((1, "nothing is sent"),),
)
def message_zeroed_once() -> Names:
    """One message of one step, rank 1's of step 7, arrives as zeros."""

    class Zero(LessonZero):
        def flat_grads(self) -> Tensor:
            flat = super().flat_grads()
            return flat * 0 if (self.rank, self.step_count) == (1, 7) else flat

    return {"ZeroOptimizer": Zero}


@fault(
    source="overlap without waiting for the step's own reduction (NVIDIA/Megatron-LM#950)",
    needs="two steps",
    check="optimizer.plain",
    stage="reduce",
    step=1,
    tensor="p0",
)
def gradients_one_step_late() -> Names:
    """The update uses the gradient whose reduction was started a step ago."""

    class Zero(LessonZero):
        def reduce(self) -> Tensor:
            late = getattr(self, "_late", torch.zeros_like(self.master))
            self._late = super().reduce()
            return late

    return {"ZeroOptimizer": Zero}


@fault(
    source="deepspeedai/DeepSpeed#8061",
    needs="more than one tensor",
    check="optimizer.plain",
    stage="reduce",
    step=1,
    tensor="p0",
    green=("optimizer.one_tensor",),
    equivalent=ONE_RANK,
)
def reduced_before_the_copy_finished() -> Names:
    """The reduction starts before the first tensor is in the bucket: for it each rank keeps its own gradient."""

    class Zero(LessonZero):
        def reduce(self) -> Tensor:
            flat, tensors = self.flat_grads(), list(self.params())
            late = tensors[0].numel() if len(tensors) > 2 else 0
            ready = flat[late:].clone()
            if self.world_size > 1:
                dist.all_reduce(ready)
            flat[late:] = ready / self.world_size
            return self.cut(flat)

    return {"ZeroOptimizer": Zero}


@fault(
    source="deepspeedai/DeepSpeed#7805",
    needs="more than one bucket a step",
    check="optimizer.one_tensor",
    stage="reduce",
    step=1,
    tensor="p0",
)
def double_buffer_index_reset() -> Names:
    """Two buckets take turns in one buffer: the first is overwritten by the second while it is in flight."""

    class Zero(LessonZero):
        def reduce(self) -> Tensor:
            flat, half = self.flat_grads(), self.chunk * self.world_size // 2
            if half:
                flat[:half] = flat[half : 2 * half]
            if self.world_size > 1:
                dist.all_reduce(flat)
            return self.cut(flat) / self.world_size

    return {"ZeroOptimizer": Zero}


@fault(
    source="torch.nan_to_num on gradients, to keep a run alive",
    needs="a NaN on one rank",
    check="optimizer.not_a_number",
    stage="reduce",
    step=2,
    rank=0,
    tensor="p0",
    green=("optimizer.plain",),
)
def nan_is_replaced_by_zero() -> Names:
    """What is not a number counts as zero on the rank that has it, and nobody hears of it."""

    class Zero(LessonZero):
        def flat_grads(self) -> Tensor:
            return super().flat_grads().nan_to_num()

    return {"ZeroOptimizer": Zero}
