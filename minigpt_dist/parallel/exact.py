"""Sums that do not depend on order: gradients rounded to a fixed grid before they are added.

Owns the grid and its range. Leaves the exchange to `zero.py`.

Floating-point addition is not associative, so the plain sum of a gradient depends on how many ranks add how many
micro-batches. On a grid of spacing 2^-36, a float64 holds every multiple below 2^17 exactly: 256 addends below 2^9 sum without
any rounding, in any order, cut anywhere (the idea of reproducible summation, Demmel & Nguyen 2013, with one fixed bin).

What it costs: each micro-batch's gradient is off by at most 2^-37 = 7.3e-12 an element (float32 itself rounds a gradient of 1e-4
by that much), elements of 512 or more become infinite (loudly, rather than inexact), the accumulator takes 8 bytes a parameter,
and the exchange moves twice the bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

GRID_BITS = 36
MAX_ADDENDS = 256
LIMIT = 2.0 ** (53 - GRID_BITS) / MAX_ADDENDS


def snap(grad: Tensor) -> Tensor:
    """`grad` (any float dtype) rounded to multiples of 2^-36, as float64; 512 and above becomes inf, NaN stays NaN."""
    scaled = grad.to(torch.float64, copy=True)
    too_large = scaled.abs() >= LIMIT
    scaled.mul_(2.0**GRID_BITS).round_().mul_(2.0**-GRID_BITS)
    return torch.where(too_large, scaled.sign() * torch.inf, scaled)
