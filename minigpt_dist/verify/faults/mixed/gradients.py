"""Faults of the loss scale in gradients: taken out too late, in 16 bits or never, or not there when they could have vanished."""

from __future__ import annotations

from torch import Tensor

from minigpt_dist.verify.faults.catalogue import Names, fault
from minigpt_dist.verify.faults.scaled import ScaledAdam


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

    return {"MixedPrecisionOptimizer": Wrong}


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

    return {"MixedPrecisionOptimizer": Wrong}


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

    return {"MixedPrecisionOptimizer": Wrong}


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

    return {"MixedPrecisionOptimizer": Wrong}
