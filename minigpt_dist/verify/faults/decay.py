"""Faults of weight decay: left out, doubled, of the wrong size, or not where it should be."""

from __future__ import annotations

import torch
from torch import Tensor

from minigpt_dist.verify.faults.base import LessonZero
from minigpt_dist.verify.faults.catalogue import Names, fault


@fault(
    source="options that are accepted and dropped",
    needs="weight decay",
    check="optimizer.weight_decay",
    stage="optimizer",
    step=1,
    tensor="p0",
    green=("optimizer.plain",),
)
def weight_decay_ignored() -> Names:
    """weight_decay has no effect."""

    class Zero(LessonZero):
        def update(self, grad: Tensor) -> None:
            self.weight_decay = 0.0
            super().update(grad)

    return {"ZeroOptimizer": Zero}


@fault(
    source="decay in the loop and in the optimizer",
    needs="weight decay",
    check="optimizer.weight_decay",
    stage="optimizer",
    step=1,
    tensor="p0",
    green=("optimizer.plain",),
)
def weight_decay_twice() -> Names:
    """Parameters are decayed before and after the update."""

    class Zero(LessonZero):
        def update(self, grad: Tensor) -> None:
            super().update(grad)
            self.master.mul_(1 - self.lr * self.weight_decay)

    return {"ZeroOptimizer": Zero}


@fault(
    source="AdamW from scratch: p -= wd * p",
    needs="weight decay",
    check="optimizer.weight_decay",
    stage="optimizer",
    step=1,
    tensor="p0",
    green=("optimizer.plain",),
)
def weight_decay_without_lr() -> Names:
    """Decay is not multiplied by the learning rate."""

    class Zero(LessonZero):
        def update(self, grad: Tensor) -> None:
            self.master.mul_((1 - self.weight_decay) / (1 - self.lr * self.weight_decay))
            super().update(grad)

    return {"ZeroOptimizer": Zero}


@fault(
    source="decay exemption built in and not documented",
    needs="weight decay, a vector",
    check="optimizer.weight_decay",
    stage="optimizer",
    step=1,
    tensor="p1",
    green=("optimizer.plain",),
)
def weight_decay_spares_vectors() -> Names:
    """Biases, norms and scalars are not decayed, although nobody asked for that."""

    class Zero(LessonZero):
        def update(self, grad: Tensor) -> None:
            matrix = self.cut(self.padded([torch.full_like(p, float(p.dim() > 1)) for p in self.params()]))
            self.master.div_(1 - self.lr * self.weight_decay).mul_(1 - self.lr * self.weight_decay * matrix)
            super().update(grad)

    return {"ZeroOptimizer": Zero}
