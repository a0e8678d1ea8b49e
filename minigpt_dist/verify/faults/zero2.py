"""Faults of ZeRO stage 2: gradients that are summed, freed, forgotten or divided at the wrong moment."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from minigpt_dist.verify.faults.catalogue import Names, fault
from minigpt_dist.verify.faults.sharding import LessonZero2

ALONE = ((1, "one rank's sum is its own gradient"),)


def _zero2(kind: type[LessonZero2]) -> Names:
    return {"Zero2Optimizer": kind}


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

    return _zero2(Wrong)


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

    return _zero2(Wrong)


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

    return _zero2(Wrong)


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

    return _zero2(Wrong)


@fault(
    source="Rajbhandari et al. 2020, section 5.2: gradients are discarded once reduced",
    needs="bytes alive between backward and step",
    check="zero2.gradients",
    stage="memory",
    world_size=4,
    green=("zero2.plain",),
)
def gradients_stay_whole_after_backward() -> Names:
    """What a hook has sent is not freed: every rank keeps all gradients, as in stage 1."""

    class Wrong(LessonZero2):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.kept: list[Tensor] = []

        def take(self, p: Tensor, total: Tensor) -> None:
            self.kept.append(total)
            super().take(p, total)

        def reduce(self) -> Tensor:
            self.kept.clear()
            return super().reduce()

    return _zero2(Wrong)


@fault(
    source="a buffer of the model's size beside the slices",
    needs="bytes alive between backward and step",
    check="zero2.gradients",
    stage="memory",
    world_size=4,
    green=("zero2.plain",),
)
def whole_sum_is_kept() -> Names:
    """The sum over ranks is kept whole on every rank, and cut at the step."""

    class Wrong(LessonZero2):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.all_sums = torch.zeros(self.chunk * self.world_size)

        def take(self, p: Tensor, total: Tensor) -> None:
            self.all_sums[self.place[p] : self.place[p] + p.numel()] += total

        def reduce(self) -> Tensor:
            grad = self.cut(self.all_sums) / self.world_size
            self.all_sums.zero_()
            return grad

        def zero_grad(self) -> None:
            super().zero_grad()
            self.all_sums.zero_()

    return _zero2(Wrong)


@fault(
    source="Rajbhandari et al. 2020, section 5.2: gradients are reduced as they become available",
    needs="bytes alive while backward runs",
    check="zero2.peak",
    stage="memory",
    world_size=4,
    green=("zero2.plain",),
)
def gradients_leave_when_backward_has_ended() -> Names:
    """All gradients are alive at once: they are exchanged at the end of backward."""

    class Wrong(LessonZero2):
        waiting = False

        def arrived(self, p: Tensor) -> None:
            if not self.waiting:
                self.waiting = True
                torch.autograd.Variable._execution_engine.queue_callback(self.ended)

        def ended(self) -> None:
            self.waiting = False
            for p in self.params():
                if p.grad is not None:
                    super().arrived(p)

    return _zero2(Wrong)


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

    return _zero2(Wrong)


@fault(
    source="a parameter of two owners",
    needs="a parameter that lies in two ranks' slices",
    check="zero2.plain",
    stage="reduce",
    step=1,
    equivalent=ALONE,
)
def parameter_across_a_boundary_has_one_owner() -> Names:
    """A gradient goes to the rank that has the first element of its parameter; the next rank's part of it is lost."""

    class Wrong(LessonZero2):
        def take(self, p: Tensor, total: Tensor) -> None:
            if self.place[p] // self.chunk == self.rank:
                super().take(p, total)

    return _zero2(Wrong)


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

    return _zero2(Wrong)


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

    return _zero2(Wrong)
