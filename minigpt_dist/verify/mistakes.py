"""Known mistakes: what a trajectory would be if an optimizer were wrong in one well-known way.

Owns the list of one-line wrong optimizers and the search for the one that reproduces what was seen, which gives a violation
its stage and its hint. A diagnosis only: no verdict depends on it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from minigpt_dist.verify.gradients import initial_value, rank_gradient
from minigpt_dist.verify.scenario import Scenario

Values = list[list[Tensor]]
FIT = 2e-5  # a wrong formula that fits what was seen leaves only float32 rounding; ten times the bound for right ones


@dataclass(frozen=True)
class Mistake:
    """A wrong optimizer. `grad(g, N)` maps gradients stacked over ranks (N, ...) to what is used in place of their mean."""

    stage: str
    hint: str
    grad: Callable[[Tensor, int, int], Tensor] = lambda g, rank, step: g.mean(0)
    step_offset: int = 0
    bias_correction: bool = True
    eps_inside: bool = False
    swap_betas: bool = False
    ignore_edits: bool = False
    ignore_groups: bool = False
    decay: str = "decoupled"
    accumulate: bool = False
    stale: bool = False


def _without(dropped: int) -> Callable[[Tensor, int, int], Tensor]:
    return lambda g, rank, step: (g.sum(0) - g[dropped]) / g.shape[0] if dropped < g.shape[0] else g.mean(0)


MISTAKES: tuple[Mistake, ...] = (
    Mistake("reduce", "gradients are summed over ranks but not divided by N", lambda g, r, t: g.sum(0)),
    Mistake("reduce", "gradients are divided by N twice", lambda g, r, t: g.mean(0) / g.shape[0]),
    Mistake("reduce", "divided by N-1 instead of N", lambda g, r, t: g.sum(0) / max(g.shape[0] - 1, 1)),
    Mistake("reduce", "each rank uses its own gradient: nothing is reduced", lambda g, r, t: g[r]),
    Mistake("reduce", "only rank 0's gradient is used", lambda g, r, t: g[0]),
    Mistake("reduce", "the share of rank 0 is missing from the mean", _without(0)),
    Mistake("reduce", "the share of rank 1 is missing from the mean", _without(1)),
    Mistake("reduce", "the share of the last rank is missing from the mean", lambda g, r, t: (g.sum(0) - g[-1]) / g.shape[0]),
    Mistake("reduce", "the largest gradient over ranks is used, not the mean", lambda g, r, t: g.amax(0)),
    Mistake("reduce", "gradients travel in bfloat16", lambda g, r, t: g.bfloat16().double().mean(0)),
    Mistake("reduce", "gradients travel in float16", lambda g, r, t: g.half().double().mean(0)),
    Mistake("optimizer", "the step counter of the bias correction is one ahead", step_offset=1),
    Mistake("optimizer", "the step counter of the bias correction is one behind", step_offset=-1),
    Mistake("optimizer", "there is no bias correction", bias_correction=False),
    Mistake("optimizer", "eps is added inside the square root", eps_inside=True),
    Mistake("optimizer", "beta1 and beta2 are exchanged", swap_betas=True),
    Mistake("optimizer", "edits of the learning rate have no effect", ignore_edits=True),
    Mistake("optimizer", "options of parameter groups have no effect", ignore_groups=True),
    Mistake("optimizer", "weight decay has no effect", decay="none"),
    Mistake("optimizer", "the gradient is applied with the wrong sign", lambda g, r, t: -g.mean(0)),
    Mistake("backward", "gradients of earlier steps are still added: zero_grad is missing or clears too little", accumulate=True),
    Mistake("gather", "parameters are one step late: gathered before they were updated", stale=True),
)


def wrong_trajectory(m: Mistake, s: Scenario, world_size: int, rank: int) -> Values:
    """[step][tensor] of float64 Adam with one mistake, as `rank` would see it."""
    own: dict[int, dict[str, float]] = {}
    for tensor, option, value in s.groups if not m.ignore_groups else ():
        own.setdefault(tensor, {})[option] = s.lr * value if option == "lr" else value
    beta1, beta2 = reversed(s.betas) if m.swap_betas else s.betas
    params = [initial_value(s.seed, i, shape) for i, shape in enumerate(s.shapes)]
    first = [torch.zeros_like(p) for p in params]
    second = [torch.zeros_like(p) for p in params]
    running = [torch.zeros(world_size, *p.shape, dtype=torch.float64) for p in params]
    values, factor = [[p.clone() for p in params]], 1.0
    for step in range(1, s.steps + 1):
        factor *= 1.0 if m.ignore_edits else _product(f for at, f in s.lr_at if at == step)
        for i, p in enumerate(params):
            if i in s.frozen or any(t == i and r == -1 and step < s.present_from for t, r in s.absent):
                continue
            now = _stacked(s, step, world_size, i)
            keep = m.accumulate or step in s.keep_grads_before
            running[i] = running[i] + now if keep else now
            g = m.grad(running[i], rank, step)
            lr = own.get(i, {}).get("lr", s.lr) * factor
            decay = 0.0 if m.decay == "none" else own.get(i, {}).get("weight_decay", s.weight_decay)
            first[i] = beta1 * first[i] + (1 - beta1) * g
            second[i] = beta2 * second[i] + (1 - beta2) * g * g
            t = step + m.step_offset
            c1, c2 = (1 - beta1**t, 1 - beta2**t) if m.bias_correction and t > 0 else (1.0, 1.0)
            v = second[i] / c2
            root = (v + s.eps).sqrt() if m.eps_inside else v.sqrt() + s.eps
            p.mul_(1 - lr * decay).sub_(lr * (first[i] / c1) / root)
        values.append([p.clone() for p in params])
    return [values[0], *values[:-1]] if m.stale else values


def _product(factors: object) -> float:
    result = 1.0
    for factor in factors:  # type: ignore[attr-defined]  # any iterable of floats
        result *= factor
    return result


def _stacked(s: Scenario, step: int, world_size: int, i: int) -> Tensor:
    """Gradients of tensor `i` at `step`, one row a rank, zeros where a rank has none."""
    rows = []
    for rank in range(world_size):
        off = any(t == i and step < s.present_from and (r == -1 or r % world_size == rank) for t, r in s.absent)
        parts = [rank_gradient(s.seed, i, s.shapes[i], step, rank, part) for part in range(s.backwards)]
        rows.append(torch.zeros(s.shapes[i], dtype=torch.float64) if off else torch.stack(parts).sum(0))
    return torch.stack(rows)


def explain(s: Scenario, world_size: int, seen: list[Values], step: int) -> tuple[str, str]:
    """(stage, hint) for a trajectory that is wrong from `step` on: the known mistake that reproduces it, or what can be told."""
    if step == 0:
        return "broadcast", "parameters changed before the first step"
    for m in MISTAKES:
        if all(_fits(wrong_trajectory(m, s, world_size, rank), values, step) for rank, values in enumerate(seen)):
            return m.stage, m.hint
    if any(not _fits(seen[0], values, step) for values in seen[1:]):
        return "gather", "ranks disagree after the step: some rank's slice is missing, misplaced or not gathered"
    if all(_fits([seen[0][step - 1]] * (step + 1), values, step) for values in seen):
        return "gather", "no parameter moved in this step"
    return "optimizer", ""


def _fits(right: Values, seen: Values, upto: int) -> bool:
    """Do both agree at every step up to `upto`, within float32 rounding?"""
    return all(
        bool(((a.double() - b.double()).abs() <= FIT).all()) for step in range(upto + 1) for a, b in zip(right[step], seen[step], strict=True)
    )
