"""A sixth host for faults: a correct guard, one exchange a step. It shares no code with `guard.py`."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor


def finite(tensors: Iterable[Tensor]) -> bool:
    return all(bool(torch.isfinite(t).all()) for t in tensors)


def agreed(*numbers: float) -> list[float]:
    """Sums over ranks."""
    total = torch.tensor(numbers, dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(total)
    return [float(n) for n in total]


def should_roll_back(loss: float, gradients: Iterable[Tensor], last: float, spike: float = 2.0) -> bool:
    """The correct base: one exchange of (loss, is it bad here, one)."""
    bad = not (math.isfinite(loss) and finite(gradients))
    total, worst, ranks = agreed(0.0 if bad else loss, float(bad), 1.0)
    return worst > 0 or total / ranks > spike * last


NAMES = {"should_roll_back": should_roll_back}
