"""Adam with one mistake: the trajectory an optimizer would show if it were wrong in one well-known way.

Owns the simulation: one process, float64, all trainable parameters as one flat vector, stopped as soon as it no longer fits what was seen.
Leaves the list of mistakes to `mistakes.py`. A diagnosis only: no verdict depends on it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from minigpt_dist.verify.flat_scenario import Flat, Layout, Step

FIT = 2e-5  # a wrong formula that fits what was seen leaves only float32 rounding; the bound for right ones is a fifth of it


@dataclass
class State:
    """Adam's state over the flat vector: parameters, moments, and the count of updates of each element."""

    p: Tensor
    first: Tensor
    second: Tensor
    count: Tensor
    factor: float = 1.0
    notes: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Mistake:
    """A wrong optimizer: `stage` to blame, `hint` for the reader, and what it does instead.

    grad: what is used in place of the mean gradient. clip: the factor, (P,) or scalar, in place of the global one. alone: each rank
    updates all parameters itself, so that ranks differ. root: the denominator, of second moment, its bias correction and eps.
    rounded: which moments `round_moments` is about. stale: parameters shown are those of the step before. every: only each so manyth
    step does anything. Other fields change one part of the update each.
    """

    stage: str
    hint: str
    grad: Callable[[Step], Tensor] = lambda x: x.mean
    clip: Callable[[Step, Tensor, float], Tensor | float] | None = None
    alone: bool = False
    count: Callable[[Tensor], Tensor] = lambda t: t
    correct_first: bool = True
    correct_second: bool = True
    root: Callable[[Tensor, Tensor, Tensor], Tensor] = lambda v, c2, eps: (v / c2).sqrt() + eps
    eps: float | None = None
    betas: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = lambda beta1, beta2: (beta1, beta2)
    lr: Callable[[float, int], float] = lambda lr, N: lr
    edits: str = "now"
    decay_edits: bool = True
    groups: bool = True
    decay: Callable[[Tensor, Layout], Tensor] = lambda d, x: d
    decay_times_lr: bool = True
    square: Callable[[Tensor], Tensor] = lambda g: g * g
    amsgrad: bool = False
    accumulate: Callable[[Layout], Tensor] | None = None
    reload: Callable[[State], None] | None = None
    round_master: torch.dtype | None = None
    round_moments: torch.dtype | None = None
    rounded: tuple[bool, bool] = (True, True)
    forget_moments: bool = False
    stale: bool = False
    every: int = 1


RIGHT = Mistake("optimizer", "")


class Simulation:
    """One mistake on one scenario, seen from one rank, a step at a time; wrong from step `since` on.

    absent_as_zero: a parameter that no rank used counts as one with a gradient of zero, instead of being skipped.
    """

    def __init__(self, mistake: Mistake, at: Layout, rank: int, since: int = 1, absent_as_zero: bool = False) -> None:
        self.mistake, self.at, self.rank, self.since, self.absent_as_zero = mistake, at, rank, since, absent_as_zero
        self.state = State(
            at.start.clone(), torch.zeros_like(at.start), torch.zeros_like(at.start), torch.zeros_like(at.start)
        )
        self.kept = torch.zeros(at.world_size, at.numel, dtype=torch.float64)
        self.earlier: Tensor | None = None
        self.step = 0

    def advance(self) -> Tensor:
        """The parameters (P,) after the next step, as they would be seen."""
        self.step += 1
        s, m = self.at.scenario, self.mistake if self.step >= self.since else RIGHT
        before = self.state.p.clone()
        now = Step(self.at, self.step, self.rank, self._kept(m), self.earlier)
        used = m.grad(now)
        self._update(m, used * self._clip(m, now, used), self._active())
        self.kept, self.earlier = now.local, now.local
        if m.reload and self.step == s.reload_at:
            m.reload(self.state)
        return before if m.stale else self.state.p

    def _kept(self, m: Mistake) -> Tensor:
        s = self.at.scenario
        if self.step in s.keep_grads_before:
            return self.kept
        if m.accumulate is not None:
            return self.kept * m.accumulate(self.at)
        return torch.zeros_like(self.kept)

    def _active(self) -> Tensor:
        """Which elements take part: those of a tensor that some rank used, and that has joined."""
        s, N = self.at.scenario, self.at.world_size
        if self.step % self.mistake.every:
            return torch.zeros(self.at.numel, dtype=torch.bool)
        idle = frozenset.intersection(*(s.without_gradient(self.step, r, N) for r in range(N)))
        if self.absent_as_zero:
            idle = frozenset()
        if s.late and self.step == 1:
            idle |= {len(s.shapes) - 1}
        return torch.isin(self.at.tensor, torch.tensor(sorted(idle), dtype=torch.long), invert=True)

    def _clip(self, m: Mistake, now: Step, used: Tensor) -> Tensor | float:
        limit = self.at.scenario.max_norm
        if not limit:
            return 1.0
        if m.clip is not None:
            return m.clip(now, used, limit)
        return min(limit / (float(used.norm()) + 1e-6), 1.0)

    def _lr(self, m: Mistake) -> Tensor:
        s = self.at.scenario
        late = 1 if m.edits == "late" else 0
        if m.edits != "ignored":
            self.state.factor *= math.prod(f for step, f in s.lr_at if step + late == self.step)
        base = m.lr(s.lr * self.state.factor, self.at.world_size)
        return self.at.option("lr", base) if m.groups else torch.full_like(self.at.start, base)

    def _constants(self, m: Mistake) -> tuple[Tensor, Tensor, Tensor]:
        """beta1, beta2 and eps of each element."""
        s = self.at.scenario
        given = [
            self.at.option(name, base) for name, base in (("beta1", s.betas[0]), ("beta2", s.betas[1]), ("eps", s.eps))
        ]
        if not m.groups:
            given = [torch.full_like(self.at.start, base) for base in (*s.betas, s.eps)]
        beta1, beta2 = m.betas(given[0], given[1])
        return beta1, beta2, given[2] if m.eps is None else torch.full_like(given[2], m.eps)

    def _update(self, m: Mistake, g: Tensor, active: Tensor) -> None:
        s, x = self.at.scenario, self.state
        beta1, beta2, eps = self._constants(m)
        lr = self._lr(m)
        decay = m.decay(
            self.at.option("weight_decay", s.weight_decay) if m.groups else torch.full_like(g, s.weight_decay), self.at
        )
        if m.decay_edits:
            decay = decay * math.prod(f for step, f in s.decay_at if step <= self.step)
        count = x.count + active
        t = m.count(count).clamp(min=0)
        old = (torch.zeros_like(g),) * 2 if m.forget_moments else (x.first, x.second)
        first, second = beta1 * old[0] + (1 - beta1) * g, beta2 * old[1] + (1 - beta2) * m.square(g)
        if m.round_moments:
            both = zip((first, second), m.rounded, strict=True)
            first, second = (a.to(m.round_moments).double() if rounded else a for a, rounded in both)
        v = second
        if m.amsgrad:
            v = x.notes["top"] = torch.maximum(second, x.notes.get("top", second))
        c1 = 1 - beta1**t if m.correct_first else torch.ones_like(t)
        c2 = 1 - beta2**t if m.correct_second else torch.ones_like(t)
        p = x.p * (1 - (lr if m.decay_times_lr else 1) * decay) - lr * (first / c1) / m.root(v, c2, eps)
        if m.round_master:
            p = p.to(m.round_master).double()
        for name, new in (("p", p), ("first", first), ("second", second), ("count", count)):
            setattr(x, name, torch.where(active, new, getattr(x, name)))


def steps_fitting(m: Mistake, at: Layout, seen: Flat, since: int = 1) -> int:
    """For how many steps from the first `m` reproduces what every rank showed; `seen[rank][step]` are flat vectors (P,)."""
    readings = (False, True) if at.scenario.absent else (False,)
    return max(_fitting(m, at, seen, since, zero) for zero in readings)


def _fitting(m: Mistake, at: Layout, seen: Flat, since: int, absent_as_zero: bool) -> int:
    ranks = range(len(seen)) if m.alone else range(1)
    if not all(fits(_first(m, at, rank, since, absent_as_zero), seen[rank][1]) for rank in ranks):
        return 0
    runs = [Simulation(m, at, rank, since, absent_as_zero) for rank in ranks]
    for step in range(1, len(seen[0])):
        shown = [run.advance() for run in runs]
        for rank, values in enumerate(seen):
            if not fits(shown[rank if m.alone else 0], values[step]):
                return step - 1
    return len(seen[0]) - 1


@functools.lru_cache(maxsize=8192)
def _first(m: Mistake, at: Layout, rank: int, since: int, absent_as_zero: bool) -> Tensor:
    """What `rank` shows after the first step: most mistakes are told apart by it, whatever is judged, so it is remembered."""
    return Simulation(m, at, rank, since, absent_as_zero).advance().clone()


def fits(a: Tensor, b: Tensor) -> bool:
    """Are both equal within float32 rounding, element by element? NaN equals NaN here."""
    return bool(close(a, b).logical_or(a.isnan() & b.isnan()).all())


def close(a: Tensor, b: Tensor) -> Tensor:
    """Element by element: equal within float32 rounding."""
    return ((a - b).abs() <= FIT * b.abs().clamp(min=1)) | (a == b)
