"""Faults of the reduction: which gradients are added, by what they are divided, and in what type they travel."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from minigpt_dist.verify.faults.base import LessonZero
from minigpt_dist.verify.faults.catalogue import Names, fault

FOUR = ("monotone_loss", "param_norms", "optimizer_bytes", "resume_bytes")
ONE_RANK = ((1, "one rank's gradient is the mean"),)


@fault(
    source="TTrace T4 (arXiv 2506.09280)",
    needs="gradients near Adam's eps, or moments",
    check="optimizer.plain",
    stage="reduce",
    step=1,
    tensor="p0",
    green=FOUR,
    equivalent=((1, "a sum over one rank is the mean"),),
)
def sum_instead_of_mean() -> Names:
    """Gradients are summed over ranks but never divided by their number; Adam hides it."""

    class Zero(LessonZero):
        def reduce(self) -> Tensor:
            return super().reduce() * self.world_size

    return {"ZeroOptimizer": Zero}


@fault(
    source="Averaging hidden in step() after the loop has averaged (PyTorch forum, DDP with manual all-reduce)",
    needs="gradients near Adam's eps",
    check="optimizer.plain",
    stage="reduce",
    step=1,
    tensor="p0",
    green=FOUR,
    equivalent=ONE_RANK,
)
def averaged_twice() -> Names:
    """The mean is divided by the number of ranks once more inside step()."""

    class Zero(LessonZero):
        def reduce(self) -> Tensor:
            return super().reduce() / self.world_size

    return {"ZeroOptimizer": Zero}


@fault(
    source="NVIDIA/Megatron-LM#906",
    needs="another number of ranks than the divisor",
    check="optimizer.plain",
    stage="reduce",
    step=1,
    tensor="p0",
    green=FOUR,
    equivalent=((4, "the divisor happens to be right"),),
)
def divisor_from_wrong_group() -> Names:
    """The divisor is the size of another group: always 4."""

    class Zero(LessonZero):
        def reduce(self) -> Tensor:
            return super().reduce() * self.world_size / 4

    return {"ZeroOptimizer": Zero}


@fault(
    source="TrainCheck C18 (arXiv 2506.14813)",
    needs="more than one rank",
    check="optimizer.plain",
    stage="reduce",
    step=1,
    tensor="p0",
    green=("param_norms",),
    equivalent=ONE_RANK,
)
def nothing_is_reduced() -> Names:
    """Each rank updates its slice with its own gradient."""

    class Zero(LessonZero):
        def reduce(self) -> Tensor:
            return self.cut(self.flat_grads())

    return {"ZeroOptimizer": Zero}


@fault(
    source="deepspeedai/DeepSpeed#855",
    needs="more than one rank",
    check="optimizer.plain",
    stage="reduce",
    step=1,
    tensor="p0",
    equivalent=ONE_RANK,
)
def engine_bypasses_the_reduction() -> Names:
    """p.grad is averaged by another route, but step() uses the copy it took before."""

    class Zero(LessonZero):
        def reduce(self) -> Tensor:
            own = self.flat_grads()
            for p in self.params():
                if p.grad is None:
                    p.grad = torch.zeros_like(p)
                if self.world_size > 1:
                    dist.all_reduce(mean := p.grad.contiguous())
                    p.grad = mean / self.world_size
            return self.cut(own)

    return {"ZeroOptimizer": Zero}


@fault(
    source="reduce_scatter with rank 0 as the only sender",
    needs="more than one rank",
    check="optimizer.plain",
    stage="reduce",
    step=1,
    tensor="p0",
    equivalent=ONE_RANK,
)
def only_rank_0_counts() -> Names:
    """Rank 0's gradient is broadcast in place of the sum."""

    class Zero(LessonZero):
        def reduce(self) -> Tensor:
            flat = self.flat_grads()
            if self.world_size > 1:
                dist.broadcast(flat, src=0)
            return self.cut(flat)

    return {"ZeroOptimizer": Zero}


@fault(
    source="loops over range(world_size - 1)",
    needs="more than one rank",
    check="optimizer.plain",
    stage="reduce",
    step=1,
    tensor="p0",
    world_size=3,
    equivalent=ONE_RANK,
)
def last_rank_left_out_of_the_sum() -> Names:
    """The sum runs over all ranks but the last, and is divided by all."""

    class Zero(LessonZero):
        def reduce(self) -> Tensor:
            flat = self.flat_grads()
            if self.world_size > 1 and self.rank == self.world_size - 1:
                flat.zero_()
            if self.world_size > 1:
                dist.all_reduce(flat)
            return self.cut(flat) / self.world_size

    return {"ZeroOptimizer": Zero}


@fault(
    source="point-to-point reduce-scatter that starts from its own buffer",
    needs="more than one rank",
    check="optimizer.plain",
    stage="reduce",
    step=1,
    tensor="p0",
)
def own_share_counts_twice() -> Names:
    """A rank adds its own gradient to a sum that holds it already."""

    class Zero(LessonZero):
        def reduce(self) -> Tensor:
            return super().reduce() + self.cut(self.flat_grads()) / self.world_size

    return {"ZeroOptimizer": Zero}


@fault(
    source="dist.ReduceOp.MAX left from a loss-scale check",
    needs="ranks whose gradients differ",
    check="optimizer.plain",
    stage="reduce",
    step=1,
    tensor="p0",
    equivalent=ONE_RANK,
)
def maximum_instead_of_mean() -> Names:
    """The element-wise maximum over ranks is taken."""

    class Zero(LessonZero):
        def reduce(self) -> Tensor:
            flat = self.flat_grads()
            if self.world_size > 1:
                dist.all_reduce(flat, op=dist.ReduceOp.MAX)
            return self.cut(flat)

    return {"ZeroOptimizer": Zero}
