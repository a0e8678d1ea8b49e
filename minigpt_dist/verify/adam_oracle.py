"""The right answer to a scenario: one process, float64, the mean of all ranks' gradients, torch's own AdamW.

Owns what "right" means, including the two points on which correct implementations differ. Shares no code with `parallel/`: the
formula is torch's, the mean is taken here.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from minigpt_dist.verify.gradients import initial_value, rank_gradient
from minigpt_dist.verify.scenario import Scenario


@dataclass(frozen=True)
class Reading:
    """Points on which correct implementations differ.

    absent: a parameter that no rank used is skipped (torch), or gets a gradient of zero (flat buffers).
    decay: decoupled from the gradient (AdamW), or added to it (Adam's L2).
    kept: gradients stay after a step until they are zeroed (torch), or step itself clears them.
    """

    absent: str = "skip"
    decay: str = "decoupled"
    kept: bool = True


TORCH = Reading()


def readings(s: Scenario) -> list[Reading]:
    """The readings of a scenario that can differ from each other, torch's first."""
    absent = ("skip", "zero") if s.absent else ("skip",)
    decay = ("decoupled", "l2") if "weight_decay" in s.needs() else ("decoupled",)
    kept = (True, False) if s.keep_grads_before else (True,)
    return [Reading(a, d, k) for a in absent for d in decay for k in kept]


def mean_gradient(s: Scenario, step: int, world_size: int, tensor: int, kept: bool = True) -> Tensor | None:
    """Mean over ranks of the gradients accumulated for `tensor` up to `step`, exact in float64; None if no rank has any."""
    first = step
    while kept and first in s.keep_grads_before:
        first -= 1
    total: Tensor | None = None
    for at in range(first, step + 1):
        for rank in range(world_size):
            if tensor in s.without_gradient(at, rank, world_size):
                continue
            for part in range(s.backwards):
                g = rank_gradient(s.seed, tensor, s.shapes[tensor], at, rank, part)
                total = g if total is None else total + g
    return None if total is None else total / world_size


def clip_scale(s: Scenario, gradients: list[Tensor | None]) -> float:
    """The factor of torch.nn.utils.clip_grad_norm_: max_norm / (norm + 1e-6), at most 1."""
    if not s.max_norm:
        return 1.0
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradients if g is not None))
    return min(s.max_norm / (norm + 1e-6), 1.0)


@functools.lru_cache(
    maxsize=1024
)  # asked again for every implementation: the whole list of scenarios; nobody writes into it
def trajectory(
    s: Scenario, world_size: int, reading: Reading = TORCH, dtype: torch.dtype = torch.float64
) -> list[list[Tensor]]:
    """Parameters before training and after each step: [step][tensor], in `dtype`."""
    params = [
        initial_value(s.seed, i, shape).to(dtype).requires_grad_(i not in s.frozen) for i, shape in enumerate(s.shapes)
    ]
    own = s.own_options()
    base = {"lr": s.lr, "betas": s.betas, "eps": s.eps, "weight_decay": s.weight_decay}
    groups = [{**base, **own.get(i, {}), "params": [p]} for i, p in enumerate(params)]
    kind = torch.optim.AdamW if reading.decay == "decoupled" else torch.optim.Adam
    optimizer = kind(groups, foreach=False)
    values = [[p.detach().clone() for p in params]]
    for step in range(1, s.steps + 1):
        for at, factor in s.lr_at:
            for group in optimizer.param_groups if at == step else ():
                group["lr"] *= factor
        for at, factor in s.decay_at:
            for group in optimizer.param_groups if at == step else ():
                group["weight_decay"] *= factor
        gradients = [mean_gradient(s, step, world_size, i, reading.kept) for i in range(len(params))]
        scale = clip_scale(s, [g for i, g in enumerate(gradients) if i not in s.frozen])
        for i, (p, g) in enumerate(zip(params, gradients, strict=True)):
            p.grad = _gradient(s, step, i, p, g, reading, scale)
        optimizer.step()
        values.append([p.detach().clone() for p in params])
    return values


def _gradient(
    s: Scenario, step: int, i: int, p: Tensor, g: Tensor | None, reading: Reading, scale: float
) -> Tensor | None:
    """What tensor `i` is to be updated with at `step`, or None to leave it alone."""
    if not p.requires_grad or (s.late and step == 1 and i == len(s.shapes) - 1):
        return None
    if g is None:
        return torch.zeros_like(p) if reading.absent == "zero" else None
    return (g * scale).to(p.dtype)


def returned_loss(s: Scenario, values: list[list[Tensor]], step: int, rank: int) -> float:
    """What step(closure) has to return on `rank`: the sum of p * w over its backwards, at the parameters before the step."""
    total = 0.0
    for part in range(s.backwards):
        for i, p in enumerate(values[step - 1]):
            if i not in s.frozen:
                total += float((p.double() * rank_gradient(s.seed, i, s.shapes[i], step, rank, part)).sum())
    return total
