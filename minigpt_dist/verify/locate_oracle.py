"""What each step of a run should have given, from what the run itself showed: the teacher-forced oracle.

Owns the mean of the gradients that the ranks really had, AdamW's formula in float64 from the parameters that they really
had, and how far a correct implementation may be from it. Every step starts anew, so a fault shows where it is, and not in
all that follows.

The bound is an error analysis, element by element, and not one constant; u is the rounding unit (2^-24 for float32). A sum
of N*M gradients in any order is off by (N*M + 4) u times the mean of their *magnitudes*: that is what counts where they
cancel. Moments carry it on as they carry gradients; Adam's step divides it by sqrt(v) + eps, which makes elements with
tiny gradients legitimately loose and leaves all others tight. Measured over 40 correct runs (ours and the plain base the
faults are planted in; N = 1, 2, 3, 5; micro-batches, weight decay, other betas and eps, exact sums, float64; 8 steps): the
worst element lies at 0.47 of its bound, and the median bound is 6e-6 lr in float32, 1e-14 lr in float64.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from minigpt_dist.config import TrainConfig
from minigpt_dist.parallel.exact import GRID_BITS

UNIT = {"float32": 2.0**-24, "float64": 2.0**-53}


class Names:
    """The trainable parameters as one vector of P elements, in declaration order."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.shapes = {name: t.shape for name, t in tensors.items()}
        self.starts: dict[str, int] = {}
        self.numel = 0
        for name, t in tensors.items():
            self.starts[name] = self.numel
            self.numel += t.numel()

    def flatten(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """(P,) float64; zeros where a tensor is absent."""
        parts = [
            tensors[n].double().flatten() if n in tensors else torch.zeros(s.numel(), dtype=torch.float64)
            for n, s in self.shapes.items()
        ]
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)

    def place(self, index: int) -> tuple[str, int]:
        """(tensor, element in it) of one element of the vector."""
        name = next(n for n in reversed(self.starts) if self.starts[n] <= index and self.shapes[n].numel())
        return name, index - self.starts[name]


def even_owner(numel: int, world_size: int) -> Tensor:
    """(P,): the rank that owns each element where the vector is cut evenly, as most implementations do."""
    return torch.arange(numel) // max(-(-numel // world_size), 1)


@dataclass
class Moments:
    """AdamW's moments (P,) in float64 after `step` updates, and how far a correct implementation's may be off.

    loose_first: of the first moment. loose_root_sq: squared, of the root of the second. root_relative: rounding of the second.
    """

    first: Tensor
    second: Tensor
    loose_first: Tensor
    loose_root_sq: Tensor
    step: int = 0

    @classmethod
    def zeros(cls, numel: int) -> Moments:
        zero = torch.zeros(numel, dtype=torch.float64)
        return cls(zero, zero, zero, zero)


@dataclass(frozen=True)
class Target:
    """What one step should have given, all (P,): the mean gradient (`shares` (N, P) add up to it, `loose` is how far it
    may be off), moments, parameters after the step; and the bounds on parameters, first and second moments.
    """

    mean: Tensor
    shares: Tensor
    loose: Tensor
    before: Tensor
    earlier: Moments
    moments: Moments
    params: Tensor
    bound: Tensor
    bound_first: Tensor
    bound_second: Tensor


class Teacher:
    """AdamW with the run's options, told each step's real gradients and parameters.

    ValueError for a dtype whose master copy is not the parameters.
    """

    def __init__(self, config: TrainConfig, numel: int, dtype: str | None = None) -> None:
        dtype = dtype or config.dtype
        if dtype not in UNIT:
            raise ValueError(
                f"dtype is {dtype!r}, but should be one of {', '.join(UNIT)} for the teacher-forced oracle"
            )
        self.config, self.moments, self.u = config, Moments.zeros(numel), UNIT[dtype]

    def expect(self, gradients: Sequence[Tensor], before: Tensor) -> Target:
        """`gradients`: (P,) of each rank, its own, mean over its micro-batches. `before`: (P,) parameters at the start of the step."""
        c, N = self.config, len(gradients)
        shares = torch.stack([g / N for g in gradients])
        loose = (N * c.micro_batches + 4) * self.u * shares.abs().sum(0)
        if c.reduction == "exact":
            loose = loose + 2.0**-GRID_BITS
        earlier, mean = self.moments, shares.sum(0)
        self.moments = advanced(earlier, mean, loose, c.betas, self.u)
        params, bound = updated(before, self.moments, c, self.u)
        now = self.moments
        second = 2 * (now.loose_root_sq * now.second).sqrt() + now.loose_root_sq + 4 * now.step * self.u * now.second
        return Target(mean, shares, loose, before, earlier, now, params, bound, now.loose_first, second)


def updated(before: Tensor, now: Moments, c: TrainConfig, u: float) -> tuple[Tensor, Tensor]:
    """(parameters after the step, how far a correct implementation's may be off), both (P,)."""
    beta1, beta2 = c.betas
    root = (now.second / (1 - beta2**now.step)).sqrt()
    below, corrected = root + c.eps, now.first / (1 - beta1**now.step)
    ratio = corrected.abs() / below
    loose_root = (now.loose_root_sq / (1 - beta2**now.step)).sqrt() + (3 * now.step + 4) * u * below
    bound = c.lr * (now.loose_first / (1 - beta1**now.step) + ratio * loose_root) / below
    return adamw(before, now.first, now.second, now.step, c), bound + 4 * u * (before.abs() + c.lr * ratio)


def advanced(m: Moments, grad: Tensor, loose: Tensor, betas: tuple[float, float], u: float) -> Moments:
    """The moments after one more gradient, which is known up to `loose`."""
    beta1, beta2 = betas
    first = beta1 * m.first + (1 - beta1) * grad
    second = beta2 * m.second + (1 - beta2) * grad.square()
    rounding = 2 * u * (m.first.abs() + (1 - beta1) * grad.abs())
    return Moments(
        first,
        second,
        beta1 * m.loose_first + (1 - beta1) * loose + rounding,
        beta2 * m.loose_root_sq + (1 - beta2) * loose.square(),
        m.step + 1,
    )


def adamw(
    before: Tensor,
    first: Tensor,
    second: Tensor,
    step: int,
    c: TrainConfig,
    lr: float | None = None,
    decay: float | None = None,
) -> Tensor:
    """Parameters after update number `step` from 1 with these moments: Loshchilov & Hutter 2019, algorithm 2."""
    lr, (beta1, beta2) = c.lr if lr is None else lr, c.betas
    shrunk = before * (1 - lr * c.weight_decay if decay is None else 1 - decay)
    return shrunk - lr * first / (1 - beta1**step) / ((second / (1 - beta2**step)).sqrt() + c.eps)


def with_gradient(target: Target, grad: Tensor, loose: Tensor, c: TrainConfig) -> tuple[Tensor, Tensor]:
    """(parameters, bound) that AdamW would have given, had it used `grad`, known up to `loose`, at this step in place of the mean."""
    now = advanced(target.earlier, grad, loose, c.betas, UNIT[c.dtype])
    return updated(target.before, now, c, UNIT[c.dtype])


def replayed(means: Sequence[Tensor], betas: tuple[float, float]) -> Moments:
    """The moments after these gradients, with other betas."""
    moments = Moments.zeros(means[0].numel())
    for mean in means:
        moments = advanced(moments, mean, torch.zeros_like(mean), betas, 0.0)
    return moments


def _with_betas(target: Target, means: Sequence[Tensor], c: TrainConfig, betas: tuple[float, float]) -> Tensor:
    m = replayed(means, betas)
    return adamw(target.before, m.first, m.second, m.step, replace(c, betas=betas))


def wrong_updates(target: Target, means: Sequence[Tensor], c: TrainConfig) -> dict[str, Callable[[], Tensor]]:
    """Cause -> the parameters that an optimizer with that mistake would have given from the right gradients.

    means: the mean gradients of all steps so far.
    """
    now, t, (beta1, beta2) = target.moments, target.moments.step, c.betas
    corrected = now.first / (1 - beta1**t)

    def update(direction: Tensor, lr: float = c.lr) -> Tensor:
        return target.before * (1 - c.lr * c.weight_decay) - lr * direction

    first_only = advanced(Moments.zeros(target.mean.numel()), target.mean, torch.zeros_like(target.mean), c.betas, 0.0)
    root = (now.second / (1 - beta2**t)).sqrt()
    found = {
        f"bias is corrected as at step {t + 1}": lambda: adamw(target.before, now.first, now.second, t + 1, c),
        "moments are used without bias correction": lambda: update(now.first / (now.second.sqrt() + c.eps)),
        "the second moment is not bias-corrected": lambda: update(corrected / (now.second.sqrt() + c.eps)),
        "the first moment is not bias-corrected": lambda: update(now.first / (root + c.eps)),
        "eps is added inside the root": lambda: update(corrected / (now.second / (1 - beta2**t) + c.eps).sqrt()),
        "the learning rate is N times too large": lambda: update(corrected / (root + c.eps), c.lr * c.world_size),
        "the learning rate is N times too small": lambda: update(corrected / (root + c.eps), c.lr / c.world_size),
        "the update has the wrong sign": lambda: update(corrected / (root + c.eps), -c.lr),
        "the moments of earlier steps are forgotten": lambda: adamw(
            target.before, first_only.first, first_only.second, t, c
        ),
        "weight decay is not applied": lambda: adamw(target.before, now.first, now.second, t, c, decay=0.0),
        "weight decay is not multiplied by the learning rate": lambda: adamw(
            target.before, now.first, now.second, t, c, decay=c.weight_decay
        ),
        "eps is not the one asked for, but 1e-8": lambda: update(corrected / (root + 1e-8)),
        "the moments and the count start again at this step": lambda: adamw(
            target.before, first_only.first, first_only.second, 1, c
        ),
        "weight decay is applied again after the update": lambda: (
            adamw(target.before, now.first, now.second, t, c) * (1 - c.lr * c.weight_decay)
        ),
        "weight decay is applied twice": lambda: adamw(
            target.before, now.first, now.second, t, c, decay=1 - (1 - c.lr * c.weight_decay) ** 2
        ),
    }
    for words, betas in (("exchanged", (beta2, beta1)), ("the defaults, not the ones asked for", (0.9, 0.999))):
        if betas != c.betas:
            found[f"betas are {words}"] = functools.partial(_with_betas, target, means, c, betas)
    if t > 1:
        found[f"bias is corrected as at step {t - 1}"] = lambda: adamw(target.before, now.first, now.second, t - 1, c)
        found["the count starts again at this step"] = lambda: adamw(target.before, now.first, now.second, 1, c)
    return found
