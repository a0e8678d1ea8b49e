"""Faults of the sum in a slice: assigned, divided by the wrong number, or not at all."""

from __future__ import annotations

from torch import Tensor

from minigpt_dist.verify.faults.catalogue import Names, fault
from minigpt_dist.verify.faults.sharding import LessonZero2

ALONE = ((1, "one rank's sum is its own gradient"),)


@fault(
    source="allenai/open-instruct#1498",
    needs="two backwards before a step",
    check="zero2.accumulation",
    stage="reduce",
    step=1,
    green=("zero2.plain", "zero2.tied"),
)
def sharded_sum_assigned_not_added() -> Names:
    """Each backward's part overwrites the slice: only the last micro-batch reaches the optimizer."""

    class Wrong(LessonZero2):
        def take(self, p: Tensor, total: Tensor) -> None:
            here, there = self.part(p)
            if here.start < here.stop:
                self.sums[there] = total[here]

    return {"Zero2Optimizer": Wrong}


@fault(
    source="a mean where micro-batches add up",
    needs="two backwards before a step",
    check="zero2.accumulation",
    stage="reduce",
    step=1,
    green=("zero2.plain",),
)
def sharded_sum_divided_by_backwards() -> Names:
    """The slice is divided by the number of backwards, which the caller's loss has done already if it wants a mean."""

    class Wrong(LessonZero2):
        seen = 0

        def arrived(self, p: Tensor) -> None:
            super().arrived(p)
            self.seen += 1

        def reduce(self) -> Tensor:
            backwards, self.seen = max(self.seen // len(self.place), 1), 0
            return super().reduce() / backwards

    return {"Zero2Optimizer": Wrong}


@fault(
    source="sum and mean confused in a hook",
    needs="two ranks",
    check="zero2.plain",
    stage="reduce",
    step=1,
    rank=0,
    equivalent=ALONE,
)
def sharded_sum_is_never_divided() -> Names:
    """The slice keeps the sum over ranks."""

    class Wrong(LessonZero2):
        def reduce(self) -> Tensor:
            return super().reduce() * self.world_size

    return {"Zero2Optimizer": Wrong}


@fault(
    source="gradients divided in the hook, and again at the step",
    needs="two ranks",
    check="zero2.plain",
    stage="reduce",
    step=1,
    rank=0,
    equivalent=ALONE,
)
def sharded_sum_divided_twice() -> Names:
    """Hook and step both divide by the number of ranks."""

    class Wrong(LessonZero2):
        def over_ranks(self, grad: Tensor) -> Tensor:
            return super().over_ranks(grad) / self.world_size

    return {"Zero2Optimizer": Wrong}
