"""Mixed-precision training as one optimizer: the name by which the suite judges loss scale, master copy and skipped steps together.

Owns that shape: backward, step and scale in one place. Leaves the scale's rule to `precision.py`, and all else to `zero.py`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from minigpt_dist.parallel.collectives import Group
from minigpt_dist.parallel.precision import LossScaler
from minigpt_dist.parallel.zero import ZeroOptimizer


class MixedPrecisionOptimizer:
    """AdamW on a float32 master copy of 16-bit parameters, cut over ranks, under a dynamic loss scale.

    Args: as `ZeroOptimizer`'s, whose errors it raises; and init_scale: the first scale, which halves when a gradient of any rank is not
    finite, and doubles after `growth_interval` steps in a row without that.
    """

    def __init__(
        self,
        module: nn.Module,
        world_size: int,
        rank: int,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        max_norm: float | None = None,
        init_scale: float = 2.0**16,
        growth_interval: int = 2000,
        group: Group = None,
    ) -> None:
        self.scaler = LossScaler(init_scale, interval=growth_interval)
        options: dict[str, Any] = {"max_norm": max_norm, "scaler": self.scaler, "group": group}
        self.zero = ZeroOptimizer(module, world_size, rank, lr, betas, eps, weight_decay, **options)

    @property
    def scale(self) -> float:
        """What the next loss is multiplied by."""
        return self.scaler.scale

    def backward(self, loss: Tensor) -> None:
        """Backward of the scaled loss."""
        self.scaler.scaled(loss).backward()

    def step(self) -> bool:
        """One update on all ranks, or on none: was there one? All ranks together."""
        skipped = self.scaler.skipped
        self.zero.step()
        return self.scaler.skipped == skipped

    def zero_grad(self) -> None:
        """Forget all gradients."""
        self.zero.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """This rank's master copy, moments, step counts and options, and the scale; copies."""
        return self.zero.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse, over a module that holds the weights of then. ValueError for a state of another layout."""
        self.zero.load_state_dict(state)
