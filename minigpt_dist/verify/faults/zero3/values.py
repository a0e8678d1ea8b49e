"""Faults of the values that stage 3 gathers and sums: pieces that are missing, rounded, stale, left or overwritten."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from minigpt_dist.verify.faults.catalogue import Names, fault
from minigpt_dist.verify.faults.sharding import LessonZero3


@fault(
    source="pieces joined without their last elements",
    needs="a parameter that lies in two ranks' slices",
    check="zero3.plain",
    stage="gather",
    step=1,
    equivalent=((1, "one rank's slice is everything"),),
)
def piece_of_the_next_rank_is_not_gathered() -> Names:
    """A parameter is gathered from the rank that has its first element; what the next has of it stays zero."""

    class Wrong(LessonZero3):
        def part(self, p: Tensor) -> tuple[slice, slice]:
            here, there = super().part(p)
            return (here, there) if self.place[p] // self.chunk == self.rank else (slice(0, 0), slice(0, 0))

    return {"Zero3Optimizer": Wrong}


@fault(
    source="weights gathered in the dtype of activations",
    needs="weights that bfloat16 cannot hold",
    check="zero3.plain",
    stage="gather",
    step=1,
)
def weights_travel_in_bfloat16() -> Names:
    """Parameters are gathered in bfloat16, and lose sixteen bits of their mantissa."""

    class Wrong(LessonZero3):
        def gathered_value(self, p: Tensor) -> Tensor:
            return super().gathered_value(p).bfloat16().float()

    return {"Zero3Optimizer": Wrong}


@fault(
    source="a weight of two modules that one of them frees",
    needs="a tied weight",
    check="zero3.tied",
    stage="gather",
    step=1,
    green=("zero3.plain", "zero3.accumulation"),
)
def tied_weight_is_gathered_for_its_first_module() -> Names:
    """The head that is tied to the first unit finds its weight freed, and computes with zeros."""

    class Wrong(LessonZero3):
        @torch.no_grad()
        def fill(self, unit: nn.Module) -> None:
            first = next(m for m in self.units() if any(p is q for p in unit.parameters() for q in m.parameters()))
            super().fill(unit)
            for p in self.trained(unit):
                if unit is not first and any(p is q for q in first.parameters()):
                    p.data.zero_()

    return {"Zero3Optimizer": Wrong}


@fault(
    source="evaluation between training steps",
    needs="a forward without gradients just before a step",
    check="zero3.forgets",
    stage="reduce",
    green=("zero3.plain", "zero3.tied"),
)
def forward_alone_leaves_weights_whole_and_stale() -> Names:
    """Weights are freed in backward, which a forward without gradients never has: the next step's begin with old values."""

    class Wrong(LessonZero3):
        def ran(self, unit: nn.Module, out: Tensor) -> None:
            if out.requires_grad:
                super().ran(unit, out)

    return {"Zero3Optimizer": Wrong}


@fault(
    source="p.grad = None where the gradient lives in a slice",
    needs="gradients that are thrown away",
    check="zero3.forgets",
    stage="reduce",
    step=1,
    green=("zero3.plain",),
)
def stage_3_zero_grad_leaves_the_slice() -> Names:
    """zero_grad clears what parameters hold, and not what was summed already."""

    class Wrong(LessonZero3):
        def zero_grad(self) -> None:
            for p in self.params():
                p.grad = None

    return {"Zero3Optimizer": Wrong}


@fault(
    source="allenai/open-instruct#1498, of stage 3",
    needs="two backwards before a step",
    check="zero3.accumulation",
    stage="reduce",
    step=1,
    green=("zero3.plain", "zero3.tied"),
)
def stage_3_sum_assigned_not_added() -> Names:
    """Each backward's part overwrites the slice: only the last micro-batch reaches the optimizer."""

    class Wrong(LessonZero3):
        def take(self, p: Tensor, total: Tensor) -> None:
            here, there = self.part(p)
            if here.start < here.stop:
                self.sums[there] = total[here]

    return {"Zero3Optimizer": Wrong}
