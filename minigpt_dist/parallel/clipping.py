"""Clipping: what became of a step's gradient whose norm was held against a bound.

Owns the scale and its report. Leaves the norm to `global_norm.py`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Clipping:
    """norm: 2-norm of the mean gradient over all parameters and ranks, before; max_norm: its bound."""

    norm: float
    max_norm: float

    @property
    def scale(self) -> float:
        """What the gradient is multiplied by: as torch.nn.utils.clip_grad_norm_, max_norm / (norm + 1e-6), at most 1."""
        return min(self.max_norm / (self.norm + 1e-6), 1.0)

    def __str__(self) -> str:
        done = (
            f"scaled by {self.scale:.4g} to {self.max_norm:g}"
            if self.scale < 1
            else f"left, as at most {self.max_norm:g}"
        )
        return f"gradient norm {self.norm:.6g}, {done}"
