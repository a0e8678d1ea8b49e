"""Faults of what stage 2 holds: gradients that stay whole, or leave only when backward has ended."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from minigpt_dist.verify.faults.catalogue import Names, fault
from minigpt_dist.verify.faults.sharding import LessonZero2


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

    return {"Zero2Optimizer": Wrong}


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

    return {"Zero2Optimizer": Wrong}


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

    return {"Zero2Optimizer": Wrong}
