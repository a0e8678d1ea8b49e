"""Faults of which gradient reaches which slice: left over, cut at the wrong place, never sent, or summed twice."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from minigpt_dist.verify.faults.catalogue import Names, fault
from minigpt_dist.verify.faults.sharding import LessonZero2


@fault(
    source="p.grad = None where the gradient lives in a slice",
    needs="gradients that are thrown away",
    check="zero2.forgets",
    stage="reduce",
    step=1,
    green=("zero2.plain", "zero2.accumulation"),
)
def zero_grad_leaves_the_slice() -> Names:
    """zero_grad clears what parameters hold, and not what was summed already."""

    class Wrong(LessonZero2):
        def zero_grad(self) -> None:
            for p in self.params():
                p.grad = None

    return {"Zero2Optimizer": Wrong}


@fault(
    source="a parameter of two owners",
    needs="a parameter that lies in two ranks' slices",
    check="zero2.plain",
    stage="reduce",
    step=1,
    equivalent=((1, "one rank's sum is its own gradient"),),
)
def parameter_across_a_boundary_has_one_owner() -> Names:
    """A gradient goes to the rank that has the first element of its parameter; the next rank's part of it is lost."""

    class Wrong(LessonZero2):
        def take(self, p: Tensor, total: Tensor) -> None:
            if self.place[p] // self.chunk == self.rank:
                super().take(p, total)

    return {"Zero2Optimizer": Wrong}


@fault(
    source="a bucket that is only sent when it is full",
    needs="an odd number of parameters",
    check="zero2.plain",
    stage="reduce",
    step=1,
    rank=0,
)
def last_bucket_is_never_sent() -> Names:
    """Gradients leave two by two; the last one of an odd number waits for a partner and is dropped at the step."""

    class Wrong(LessonZero2):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.bucket: list[Tensor] = []

        def arrived(self, p: Tensor) -> None:
            self.bucket.append(p)
            if len(self.bucket) == 2:
                for q in self.bucket:
                    super().arrived(q)
                self.bucket.clear()

        def reduce(self) -> Tensor:
            for p in self.bucket:
                p.grad = None
            self.bucket.clear()
            return super().reduce()

    return {"Zero2Optimizer": Wrong}


@fault(
    source="named_parameters(remove_duplicate=False) over a model with a tied head",
    needs="a tied weight",
    check="zero2.tied",
    stage="reduce",
    step=1,
    tensor="units.0.weight",
    green=("zero2.plain", "zero2.accumulation"),
)
def tied_weight_is_summed_once_a_name() -> Names:
    """A weight that the module holds under two names has two hooks, and its gradient counts twice."""

    class Wrong(LessonZero2):
        def __init__(self, module: nn.Module, world_size: int, rank: int, **options: Any) -> None:
            super().__init__(module, world_size, rank, **options)
            names = [id(p) for _, p in module.named_parameters(remove_duplicate=False)]
            self.twice = {id(p) for p in self.params() if names.count(id(p)) > 1}

        def take(self, p: Tensor, total: Tensor) -> None:
            super().take(p, total)
            if id(p) in self.twice:
                super().take(p, total)

    return {"Zero2Optimizer": Wrong}
