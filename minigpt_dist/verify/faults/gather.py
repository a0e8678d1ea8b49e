"""Faults of the gather: whose slice reaches whom, in which order, and into what."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from minigpt_dist.verify.faults.base import LessonZero
from minigpt_dist.verify.faults.catalogue import Names, fault


@fault(
    source="NVIDIA/Megatron-LM#950, overlapped parameter gather",
    needs="nothing",
    check="optimizer.plain",
    stage="gather",
    step=1,
    tensor="p0",
    green=("param_norms",),
)
def gathered_before_the_update() -> Names:
    """The gather is started before the update has been written: parameters are one step late."""

    class Zero(LessonZero):
        def step(self) -> None:
            self.step_count += 1
            grad, old = self.reduce(), self.gather().clone()
            self.update(grad)
            self.write_back(old)

    return {"ZeroOptimizer": Zero}


@fault(
    source="the all-gather forgotten",
    needs="more than one rank",
    check="optimizer.plain",
    stage="gather",
    step=1,
    tensor="p0",
    equivalent=((1, "there is nothing to gather"),),
)
def nothing_is_gathered() -> Names:
    """Each rank writes back its own slice only; the others keep their old values there."""

    class Zero(LessonZero):
        def gather(self) -> Tensor:
            flat = self.flat_params()
            flat[self.rank * self.chunk : (self.rank + 1) * self.chunk] = self.master
            return flat

    return {"ZeroOptimizer": Zero}


@fault(
    source="loops over range(world_size - 1)",
    needs="more than one rank",
    check="optimizer.plain",
    stage="gather",
    step=1,
    rank=0,
    world_size=3,
    equivalent=((1, "there is nothing to gather"),),
)
def last_slice_not_gathered() -> Names:
    """The last rank's slice reaches nobody else."""

    class Zero(LessonZero):
        def gather(self) -> Tensor:
            flat = super().gather()
            last = (self.world_size - 1) * self.chunk
            if self.rank < self.world_size - 1:
                flat[last:] = self.flat_params()[last:]
            return flat

    return {"ZeroOptimizer": Zero}


@fault(
    source="deepspeedai/DeepSpeed#5283",
    needs="more than one rank",
    check="optimizer.plain",
    stage="gather",
    step=1,
    tensor="p0",
    world_size=3,
    equivalent=((1, "one slice is in order"),),
)
def slices_joined_in_reverse() -> Names:
    """The gathered slices are joined from the last rank to the first."""

    class Zero(LessonZero):
        def gather(self) -> Tensor:
            return torch.cat(list(super().gather().split(self.chunk))[::-1])

    return {"ZeroOptimizer": Zero}


@fault(
    source="deepspeedai/DeepSpeed#5283, names sorted as text",
    needs="eleven ranks: rank10 sorts before rank2",
    check="optimizer.plain",
    stage="gather",
    step=1,
    world_size=11,
    equivalent=tuple((N, "up to ten ranks sort alike as text and as numbers") for N in range(1, 11)),
)
def slices_joined_as_text() -> Names:
    """The gathered slices are joined in the order of their names, sorted as text."""

    class Zero(LessonZero):
        def gather(self) -> Tensor:
            named = {f"rank{r}": part for r, part in enumerate(super().gather().split(self.chunk))}
            return torch.cat([named[name] for name in sorted(named)])

    return {"ZeroOptimizer": Zero}


@fault(
    source="TrainCheck N1, Lightning-AI issue AC-2665: an optimizer built before wrapping",
    needs="nothing",
    check="optimizer.plain",
    stage="gather",
    step=1,
    tensor="p0",
)
def optimizer_on_copies_of_the_parameters() -> Names:
    """The optimizer holds a deep copy of the module; the module that is trained never changes."""

    class Zero(LessonZero):
        def __init__(self, module: nn.Module, *args: Any, **options: Any) -> None:
            super().__init__(copy.deepcopy(module), *args, **options)

    return {"ZeroOptimizer": Zero}


@fault(
    source="p.data = slice of a float32 buffer",
    needs="float64 parameters",
    check="optimizer.float64",
    stage="gather",
    green=("optimizer.plain",),
)
def parameters_change_their_type() -> Names:
    """The new values are put in place of the parameter's data, in the type of the buffer."""

    class Zero(LessonZero):
        def write_back(self, flat: Tensor) -> None:
            offset = 0
            for p in self.params():
                p.data = flat[offset : offset + p.numel()].view(p.shape).clone()
                offset += p.numel()

    return {"ZeroOptimizer": Zero}
