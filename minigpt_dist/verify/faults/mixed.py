"""Faults of mixed precision: the loss scale's place and its rule, steps that some ranks skip, and the master copy."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from minigpt_dist.verify.faults.catalogue import Names, fault
from minigpt_dist.verify.faults.scaled import ScaledAdam

ALONE = ((1, "nobody else decides"),)


def _scaled(kind: type[ScaledAdam]) -> Names:
    return {"MixedPrecisionOptimizer": kind}


@fault(
    source="pytorch/examples#1196",
    needs="a bound on the norm",
    check="precision.clip",
    stage="clip",
    step=1,
    rank=0,
    green=("precision.plain", "precision.overflow"),
)
def clip_before_unscale() -> Names:
    """Gradients are clipped while the scale is still in them: the bound is divided by it."""

    class Wrong(ScaledAdam):
        def prepared(self, own: Tensor) -> Tensor:
            return self.unscale(self.clip(self.mean(own)))

    return _scaled(Wrong)


@fault(
    source="Micikevicius et al. 2018, section 3.2: gradients that become zeros in half precision",
    needs="gradients below 6e-8",
    check="precision.vanishing",
    stage="optimizer",
    step=1,
    rank=0,
    green=("precision.plain", "precision.clip"),
)
def loss_is_scaled_after_backward() -> Names:
    """Gradients are multiplied by the scale once they are there, and divided again: what vanished stays zero."""

    class Wrong(ScaledAdam):
        def backward(self, loss: Tensor) -> None:
            loss.backward()
            for p in self.params:
                if p.grad is not None:
                    p.grad.mul_(self.scale)

    return _scaled(Wrong)


@fault(
    source="p.grad.div_(scale) on gradients of 16 bits",
    needs="gradients below 6e-8",
    check="precision.vanishing",
    stage="optimizer",
    step=1,
    rank=0,
    green=("precision.plain", "precision.clip"),
)
def unscaled_in_16_bits() -> Names:
    """The scale is divided out in float16, where what it saved is lost."""

    class Wrong(ScaledAdam):
        def unscale(self, grad: Tensor) -> Tensor:
            return super().unscale(grad).half().float()

    return _scaled(Wrong)


@fault(
    source="a loss scale that Adam hides: its update hardly depends on the gradient's size",
    needs="an eps that counts",
    check="precision.plain",
    stage="optimizer",
    step=1,
    rank=0,
)
def scale_is_never_taken_out() -> Names:
    """The optimizer is given scaled gradients."""

    class Wrong(ScaledAdam):
        def unscale(self, grad: Tensor) -> Tensor:
            return grad

    return _scaled(Wrong)


@fault(
    source="torch.amp.GradScaler: found_inf is each process's own where gradients are not reduced before it looks",
    needs="an overflow on one rank",
    check="precision.overflow",
    stage="optimizer",
    step=2,
    rank=0,
    green=("precision.plain", "precision.clip"),
    equivalent=ALONE,
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

    return _scaled(Wrong)


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

    return _scaled(Wrong)


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

    return _scaled(Wrong)


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

    return _scaled(Wrong)


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

    return _scaled(Wrong)


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

    return _scaled(Wrong)


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

    return _scaled(Wrong)


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

    return _scaled(Wrong)


@fault(
    source="NVIDIA/Model-Optimizer#2322",
    needs="updates below half the spacing of parameters",
    check="precision.small_updates",
    stage="optimizer",
    green=("precision.overflow",),
)
def no_master_updates_vanish() -> Names:
    """Parameters of 16 bits are updated in place: small updates are rounded away, one after the other."""

    class Wrong(ScaledAdam):
        def update(self, grad: Tensor) -> None:
            with torch.no_grad():
                self.master.copy_(self.flat([p.detach() for p in self.params]))
            super().update(grad)

    return _scaled(Wrong)


@fault(
    source="TensorAuto/OpenTau#185",
    needs="a restart, and updates below half the spacing of parameters",
    check="precision.resume",
    stage="load",
    green=("precision.plain", "precision.small_updates"),
)
def master_derived_from_16_bits() -> Names:
    """The master copy is not saved, and made again from the parameters: what it held below their spacing is lost at each restart."""

    class Wrong(ScaledAdam):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            super().load_state_dict({**state, "master": self.flat([p.detach() for p in self.params])})

    return _scaled(Wrong)


@fault(
    source="NVIDIA/apex#42",
    needs="a step after a restart",
    check="precision.resume",
    stage="load",
    step=2,
    rank=0,
    green=("precision.plain", "precision.small_updates"),
)
def master_created_before_load() -> Names:
    """The master copy is that of the model's first weights: a step after the load puts these back."""

    class Wrong(ScaledAdam):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            super().load_state_dict({**state, "master": self.master.detach().clone()})

    return _scaled(Wrong)


@fault(
    source="a scaler whose state is not in the checkpoint",
    needs="a restart after an overflow",
    check="precision.resume",
    stage="load",
    step=3,
    rank=0,
    green=("precision.scale", "precision.overflow"),
)
def scale_forgotten_at_a_restart() -> Names:
    """After a restart the scale is the first again, and overflows again."""

    class Wrong(ScaledAdam):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            super().load_state_dict({**state, "scale": self.scale})

    return _scaled(Wrong)
