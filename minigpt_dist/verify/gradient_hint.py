"""The search for a known mistake that explains a wrong averaged gradient, which gives a violation its hint.

Owns the comparison with what `known_mistakes/` would leave in one tensor. A diagnosis only: no verdict depends on it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minigpt_dist.verify.flat_scenario import Layout, Step, layout
from minigpt_dist.verify.known_mistakes import FACTORS, REDUCE
from minigpt_dist.verify.scenario import Scenario

ROUNDING = {torch.float32: 2e-6, torch.float64: 4e-15}  # sixteen roundings; bfloat16's own is 4e-3
HALF = 0.02  # a few roundings of bfloat16


def _step(at: Layout, step: int, rank: int) -> Step:
    nothing = torch.zeros(at.world_size, at.numel, dtype=torch.float64)
    earlier = Step(at, step - 1, rank, nothing).local if step > 1 else None
    return Step(at, step, rank, nothing, earlier)


def explain_gradient(s: Scenario, world_size: int, step: int, rank: int, tensor: int, seen: Tensor) -> str:
    """What `seen`, the gradient of one trainable tensor on `rank` after averaging, would come from; "" if nothing known fits."""
    at = layout(s, world_size)
    x, here = _step(at, step, rank), at.tensor == tensor
    first = sum(torch.Size(s.shapes[i]).numel() for i in at.tensors if i < tensor)
    values = seen.double().flatten()[at.places[here] - first]
    right = x.mean[here]
    rounding = ROUNDING[s.dtype_of(tensor)]
    wrong = (values - right).abs() > rounding * right.abs()
    if not bool(wrong.any()):
        return ""
    part = "" if bool(wrong.all()) else "in a part of it, "
    for mistake in (*REDUCE, *FACTORS):
        like = mistake.grad(x)[here]
        if bool(((values - like).abs() <= rounding * like.abs())[wrong].all()):
            return part + mistake.hint
    off = float(((values - right).abs() / right.abs())[wrong].max())
    return f"right to {off:.1g} of its size: it travels in a narrower type" if off < HALF else ""
