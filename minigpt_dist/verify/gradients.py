"""Gradients chosen by the judge: per rank, exact to add in any order, and telling.

Owns the numbers. Each element has one power of two as its unit, and every rank's gradient is a whole number of units small
enough that all sums over ranks and backwards are exact in float32: a correct mean has no rounding noise to tolerate, whatever the
order of the sum. The units span four regimes: near Adam's eps (where a missing division by N shows, which Adam otherwise hides),
small, one, and large.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

UNIT_BITS = (-42, -24, -18, -14)  # with 2^15..2^17 units: about 7e-9..3e-8 (eps is 1e-8), 2e-3.., 0.1.., 2..8
LEAST, MOST = 2**15, 2**17


def _generator(*key: object) -> torch.Generator:
    seed = int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:7], "big")
    return torch.Generator().manual_seed(seed)


def rank_gradient(seed: int, tensor: int, shape: tuple[int, ...], step: int, rank: int, part: int = 0) -> Tensor:
    """The gradient, float64, that `rank` gets for tensor number `tensor` at `step` from its backward number `part`.

    Signs are fixed for an element, so that the sum over ranks never cancels; magnitudes differ by rank, part and step.
    """
    numel = math.prod(shape)
    fixed = _generator("element", seed, tensor)
    bits = torch.tensor(UNIT_BITS, dtype=torch.float64)[torch.randint(len(UNIT_BITS), (numel,), generator=fixed)]
    sign = torch.randint(0, 2, (numel,), generator=fixed).double() * 2 - 1
    units = torch.randint(LEAST, MOST, (numel,), generator=_generator("units", seed, tensor, step, rank, part)).double()
    return (sign * units * 2.0**bits).reshape(shape)


def initial_value(seed: int, tensor: int, shape: tuple[int, ...]) -> Tensor:
    """Starting value of a parameter, float64, exactly representable in float32, of order one and never near zero."""
    raw = torch.randint(2**12, 2**14, (math.prod(shape),), generator=_generator("value", seed, tensor)).double()
    sign = torch.randint(0, 2, (math.prod(shape),), generator=_generator("sign", seed, tensor)).double() * 2 - 1
    return (sign * raw * 2.0**-13).reshape(shape)
