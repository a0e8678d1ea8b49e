"""Faults of an overflow: steps that some ranks skip, that are made or counted all the same, and the rule of the scale."""

from __future__ import annotations

import torch
from torch import Tensor

from minigpt_dist.verify.faults.catalogue import Names, fault
from minigpt_dist.verify.faults.scaled import ScaledAdam


@fault(
    source="torch.amp.GradScaler: found_inf is each process's own where gradients are not reduced before it looks",
    needs="an overflow on one rank",
    check="precision.overflow",
    stage="optimizer",
    step=2,
    rank=0,
    green=("precision.plain", "precision.clip"),
    equivalent=((1, "nobody else decides"),),
)
def every_rank_decides_on_its_own_to_skip() -> Names:
    """The rank that sees the overflow skips its step, and the others make it."""

    class Wrong(ScaledAdam):
        def finite(self, grad: Tensor) -> bool:
            super().finite(grad)
            return bool(torch.isfinite(grad).all())

        def step(self) -> bool:
            own = self.gradient()
            mean = self.mean(torch.nan_to_num(own, 0.0, 0.0, 0.0))
            if good := self.finite(own):
                self.update(self.clip(self.unscale(mean)))
                self.cast()
            self.rescale(good)
            return good

    return {"MixedPrecisionOptimizer": Wrong}


@fault(
    source="nan_to_num on gradients",
    needs="an overflow",
    check="precision.overflow",
    stage="optimizer",
    step=2,
    rank=0,
    green=("precision.plain",),
)
def overflowed_elements_become_zeros() -> Names:
    """An infinite gradient is replaced by zero and the step made, with one element missing."""

    class Wrong(ScaledAdam):
        def gradient(self) -> Tensor:
            return torch.nan_to_num(super().gradient(), 0.0, 0.0, 0.0)

    return {"MixedPrecisionOptimizer": Wrong}


@fault(
    source="torch.isnan in place of torch.isfinite",
    needs="an infinite gradient",
    check="precision.overflow",
    stage="optimizer",
    step=2,
    rank=0,
    green=("precision.plain",),
)
def infinity_is_no_overflow() -> Names:
    """Only NaN is looked for, and inf reaches the moments."""

    class Wrong(ScaledAdam):
        def finite(self, grad: Tensor) -> bool:
            return super().finite(torch.where(grad.isinf(), 0.0, grad))

    return {"MixedPrecisionOptimizer": Wrong}


@fault(
    source="a step counter beside the optimizer's",
    needs="a skipped step, and moments that are corrected for bias",
    check="precision.overflow",
    stage="optimizer",
    step=3,
    rank=0,
    green=("precision.plain", "precision.clip"),
)
def skipped_step_counts_for_adam() -> Names:
    """A skipped step counts in the correction of the moments' bias."""

    class Wrong(ScaledAdam):
        def rescale(self, finite: bool) -> None:
            super().rescale(finite)
            state = self.adam.state[self.master]
            if not finite and state:
                state["step"] += 1

    return {"MixedPrecisionOptimizer": Wrong}


@fault(
    source="a step that is undone by adding it back",
    needs="a skipped step, and moments",
    check="precision.overflow",
    stage="optimizer",
    step=3,
    rank=0,
    green=("precision.plain",),
)
def skipped_step_decays_the_moments() -> Names:
    """Weights stay at a skipped step, and moments are updated with a gradient of zero."""

    class Wrong(ScaledAdam):
        def rescale(self, finite: bool) -> None:
            super().rescale(finite)
            if not finite:
                before = self.master.detach().clone()
                self.update(torch.zeros_like(before))
                with torch.no_grad():
                    self.master.copy_(before)

    return {"MixedPrecisionOptimizer": Wrong}


@fault(
    source="a static scale",
    needs="an overflow",
    check="precision.overflow",
    stage="optimizer",
    step=2,
    rank=0,
    green=("precision.plain",),
)
def scale_never_falls() -> Names:
    """Steps are skipped, and the scale stays."""

    class Wrong(ScaledAdam):
        def rescale(self, finite: bool) -> None:
            if finite:
                super().rescale(finite)

    return {"MixedPrecisionOptimizer": Wrong}


@fault(
    source="a scale that only falls",
    needs="a clean while",
    check="precision.scale",
    stage="optimizer",
    step=2,
    rank=0,
    green=("precision.plain", "precision.overflow"),
)
def scale_never_grows() -> Names:
    """After an overflow the scale stays low for ever."""

    class Wrong(ScaledAdam):
        def rescale(self, finite: bool) -> None:
            super().rescale(finite)
            self.clean = min(self.clean, self.interval - 2)

    return {"MixedPrecisionOptimizer": Wrong}


@fault(
    source="growth counted in steps, not in clean steps in a row",
    needs="an overflow within the while",
    check="precision.scale",
    stage="optimizer",
    green=("precision.plain", "precision.overflow"),
)
def overflow_does_not_restart_the_clean_while() -> Names:
    """Clean steps before an overflow count towards the next growth."""

    class Wrong(ScaledAdam):
        def rescale(self, finite: bool) -> None:
            clean = self.clean
            super().rescale(finite)
            self.clean = clean if not finite else self.clean

    return {"MixedPrecisionOptimizer": Wrong}
