"""Mixed precision: the dynamic loss scale under which 16-bit gradients neither vanish nor overflow (Micikevicius et al. 2018, section 3).

Owns the scale, what it becomes after a step, and how often a step was skipped. Leaves the float32 master copy and the question whether
*any* rank saw an overflow to the optimizer, and the dtypes of parameters and activations to the model: with `model.to(torch.float16)`
or `torch.bfloat16` both are 16 bits wide, gradients too, while master copy, moments, sums over ranks and the loss are float32.

bfloat16 has float32's range and needs no scale; float16's smallest number is 6e-8, below which gradients of a trained model lie.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

KEPT = ("scale", "clean", "skipped")


class LossScaler:
    """Multiplies the loss by `scale`; after each step the scale falls if a gradient overflowed, and rises after a clean while.

    Powers of two by default, so that scaling changes no bit of what neither vanishes nor overflows.

    Args:
        scale: the first. growth: factor after `interval` clean steps in a row. backoff: factor after an overflow. least: bound of the fall.

    `clean` counts steps since the last change, `skipped` those that were skipped in the whole run. ValueError for options out of range.
    """

    def __init__(
        self,
        scale: float = 2.0**16,
        growth: float = 2.0,
        backoff: float = 0.5,
        interval: int = 2000,
        least: float = 1.0,
    ) -> None:
        if not (math.isfinite(scale) and scale >= least > 0):
            raise ValueError(
                f"scale is {scale!r}, but should be finite and at least {least!r}, which should be above 0"
            )
        if not (math.isfinite(growth) and growth >= 1):
            raise ValueError(f"growth is {growth!r}, but should be finite and at least 1")
        if not 0 < backoff < 1:
            raise ValueError(f"backoff is {backoff!r}, but should be above 0 and below 1")
        if type(interval) is not int or interval < 1:
            raise ValueError(f"interval is {interval!r}, but should be a whole number of at least 1")
        self.scale, self.growth, self.backoff, self.interval, self.least = scale, growth, backoff, interval, least
        self.clean = self.skipped = 0

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss to call backward on."""
        return loss * self.scale

    def unscale_(self, grads: list[Tensor]) -> bool:
        """Divide gradients by the scale, in place; are all of this rank's finite?"""
        for grad in grads:
            grad.div_(self.scale)
        return all(bool(torch.isfinite(grad).all()) for grad in grads)

    def update(self, finite: bool) -> None:
        """After a step, with what all ranks agreed on."""
        if not finite:
            self.scale, self.clean = max(self.scale * self.backoff, self.least), 0
            self.skipped += 1
            return
        self.clean += 1
        if self.clean == self.interval:
            grown = self.scale * self.growth
            self.scale, self.clean = grown if math.isfinite(grown) else self.scale, 0

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in KEPT}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """ValueError, before anything is changed, for a state without one of the three numbers."""
        if set(state) != set(KEPT):
            raise ValueError(f"the loss scaler's state has {sorted(state)}, but should have {sorted(KEPT)}")
        self.scale, self.clean, self.skipped = float(state["scale"]), int(state["clean"]), int(state["skipped"])
