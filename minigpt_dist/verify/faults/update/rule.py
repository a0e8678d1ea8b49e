"""Faults of Adam's rule: eps, betas, moments and sign."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from minigpt_dist.verify.faults.base import LessonZero
from minigpt_dist.verify.faults.catalogue import Names, fault


@fault(
    source="PyTorch forum, Adam from scratch",
    needs="gradients near Adam's eps",
    check="optimizer.plain",
    stage="optimizer",
    step=1,
    tensor="p0",
)
def eps_inside_the_root() -> Names:
    """eps is added to the second moment before the root is taken."""

    class Zero(LessonZero):
        def apply(self, first: Tensor, second: Tensor) -> None:
            self.master.addcdiv_(first, (second + self.eps).sqrt_(), value=-self.lr)

    return {"ZeroOptimizer": Zero}


@fault(
    source="fused kernels with a compiled-in eps",
    needs="an eps other than 1e-8",
    check="optimizer.large_eps",
    stage="optimizer",
    step=1,
    tensor="p0",
    green=("optimizer.plain",),
)
def eps_option_ignored() -> Names:
    """eps is 1e-8 whatever is asked for."""

    class Zero(LessonZero):
        def apply(self, first: Tensor, second: Tensor) -> None:
            self.master.addcdiv_(first, second.sqrt().add_(1e-8), value=-self.lr)

    return {"ZeroOptimizer": Zero}


@fault(
    source="betas given as (beta2, beta1)",
    needs="two steps",
    check="optimizer.plain",
    stage="optimizer",
    step=2,
    tensor="p0",
    green=("param_norms",),
)
def betas_exchanged() -> Names:
    """beta1 and beta2 change places."""

    class Zero(LessonZero):
        def update(self, grad: Tensor) -> None:
            self.betas = self.betas[::-1]
            super().update(grad)
            self.betas = self.betas[::-1]

    return {"ZeroOptimizer": Zero}


@fault(
    source="options that are accepted and dropped",
    needs="betas other than the defaults",
    check="optimizer.betas",
    stage="optimizer",
    step=2,
    tensor="p0",
    green=("optimizer.plain",),
)
def betas_ignored() -> Names:
    """betas are (0.9, 0.999) whatever is asked for."""

    class Zero(LessonZero):
        def update(self, grad: Tensor) -> None:
            self.betas = (0.9, 0.999)
            super().update(grad)

    return {"ZeroOptimizer": Zero}


@fault(
    source="state made inside step()",
    needs="two steps",
    check="optimizer.plain",
    stage="optimizer",
    step=2,
    tensor="p0",
)
def moments_forgotten_each_step() -> Names:
    """Both moments start from zero at every step."""

    class Zero(LessonZero):
        def update(self, grad: Tensor) -> None:
            self.exp_avg.zero_()
            self.exp_avg_sq.zero_()
            super().update(grad)

    return {"ZeroOptimizer": Zero}


@fault(
    source="zeros reused for both moments",
    needs="nothing",
    check="optimizer.plain",
    stage="optimizer",
    step=1,
    tensor="p0",
)
def moments_share_memory() -> Names:
    """exp_avg and exp_avg_sq are one tensor."""

    class Zero(LessonZero):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.exp_avg_sq = self.exp_avg

    return {"ZeroOptimizer": Zero}


@fault(
    source="amsgrad left on",
    needs="a gradient that becomes smaller",
    check="optimizer.betas",
    stage="optimizer",
    tensor="p0",
)
def amsgrad_always_on() -> Names:
    """The largest second moment so far is used."""

    class Zero(LessonZero):
        def apply(self, first: Tensor, second: Tensor) -> None:
            top = getattr(self, "_top", self.exp_avg_sq.clone())
            self._top = torch.maximum(top, self.exp_avg_sq)
            super().apply(first, self._top / (1 - self.betas[1] ** self.step_count))

    return {"ZeroOptimizer": Zero}


@fault(
    source="gradient ascent: the sign of the update",
    needs="nothing",
    check="optimizer.plain",
    stage="optimizer",
    step=1,
    tensor="p0",
)
def sign_of_the_update() -> Names:
    """The update is added instead of subtracted."""

    class Zero(LessonZero):
        def apply(self, first: Tensor, second: Tensor) -> None:
            super().apply(-first, second)

    return {"ZeroOptimizer": Zero}


@fault(
    source="defaults given as (beta2, beta1)",
    needs="a constructor that is given no betas",
    check="optimizer.defaults",
    stage="optimizer",
    step=2,
    tensor="p0",
    green=("optimizer.plain", "optimizer.betas"),
)
def beta_defaults_exchanged() -> Names:
    """The constructor's defaults are beta1 = 0.999 and beta2 = 0.9."""

    class Zero(LessonZero):
        def __init__(
            self,
            module: nn.Module,
            world_size: int,
            rank: int,
            lr: float = 1e-2,
            betas: tuple[float, float] = (0.999, 0.9),
            eps: float = 1e-8,
            weight_decay: float = 0.0,
        ) -> None:
            super().__init__(module, world_size, rank, lr, betas, eps, weight_decay)

    return {"ZeroOptimizer": Zero}
