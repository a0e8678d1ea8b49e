"""Mistakes in what is done with a right gradient: the update, what stays from step to step, what a load restores."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from minigpt_dist.verify.flat_scenario import Layout
from minigpt_dist.verify.wrong_adam import Mistake, State


def _only_matrices(decay: Tensor, x: Layout) -> Tensor:
    """Decay for tensors of two and more dimensions alone."""
    small = [i for i, shape in enumerate(x.scenario.shapes) if len(shape) < 2]
    return decay * ~torch.isin(x.tensor, torch.tensor(small))


def _default_betas(beta1: Tensor, beta2: Tensor) -> tuple[Tensor, Tensor]:
    return torch.full_like(beta1, 0.9), torch.full_like(beta2, 0.999)


def _not_owned(x: Layout) -> Tensor:
    """(N, P): 1 where rank r owns no element of the parameter, and so leaves its gradient standing."""
    result = torch.ones(x.world_size, x.numel, dtype=torch.float64)
    for rank in range(x.world_size):
        result[rank, torch.isin(x.tensor, x.tensor[x.owner == rank])] = 0
    return result


def _lose(*names: str) -> Callable[[State], None]:
    def reload(x: State) -> None:
        for name in names:
            getattr(x, name).zero_()

    return reload


def _count_twice(x: State) -> None:
    x.count.mul_(2)


def _constructors_lr(x: State) -> None:
    x.factor = 1.0


OPTIMIZER: tuple[Mistake, ...] = (
    Mistake("optimizer", "the step counter of the bias correction is one ahead", count=lambda t: t + 1),
    Mistake("optimizer", "the step counter of the bias correction is one behind", count=lambda t: t - 1),
    Mistake("optimizer", "the step counter of the bias correction moves twice a step", count=lambda t: 2 * t),
    Mistake("optimizer", "there is no bias correction", correct_first=False, correct_second=False),
    Mistake("optimizer", "the second moment has no bias correction", correct_second=False),
    Mistake("optimizer", "the first moment has no bias correction", correct_first=False),
    Mistake("optimizer", "eps is added inside the square root", root=lambda v, c2, eps: (v / c2 + eps).sqrt()),
    Mistake(
        "optimizer",
        "eps is added inside the square root, before the bias correction",
        root=lambda v, c2, eps: ((v + eps) / c2).sqrt(),
    ),
    Mistake(
        "optimizer", "eps is added before the bias correction", root=lambda v, c2, eps: (v.sqrt() + eps) / c2.sqrt()
    ),
    Mistake("optimizer", "the square root of eps is added", root=lambda v, c2, eps: (v / c2).sqrt() + eps.sqrt()),
    Mistake("optimizer", "the square root of the second moment is missing", root=lambda v, c2, eps: v / c2 + eps),
    Mistake("optimizer", "beta1 and beta2 are exchanged", betas=lambda beta1, beta2: (beta2, beta1)),
    Mistake("optimizer", "the betas given have no effect", betas=_default_betas),
    Mistake("optimizer", "the eps given has no effect", eps=1e-8),
    Mistake("optimizer", "the learning rate is multiplied by N", lr=lambda lr, N: lr * N),
    Mistake("optimizer", "the learning rate is divided by N", lr=lambda lr, N: lr / N),
    Mistake("optimizer", "edits of weight decay have no effect", decay_edits=False),
    Mistake("optimizer", "edits of the learning rate have no effect", edits="ignored"),
    Mistake("optimizer", "edits of the learning rate hold one step late", edits="late"),
    Mistake("optimizer", "options of parameter groups have no effect", groups=False),
    Mistake("optimizer", "weight decay has no effect", decay=lambda d, x: torch.zeros_like(d)),
    Mistake("optimizer", "weight decay is applied twice", decay=lambda d, x: 2 * d),
    Mistake("optimizer", "weight decay leaves out tensors of less than two dimensions", decay=_only_matrices),
    Mistake("optimizer", "weight decay is not multiplied by the learning rate", decay_times_lr=False),
    Mistake("optimizer", "the gradient is applied with the wrong sign", lambda x: -x.mean),
    Mistake("optimizer", "the second moment averages |g| instead of its square", square=torch.abs),
    Mistake("optimizer", "the largest second moment so far is used (AMSGrad)", amsgrad=True),
    Mistake("optimizer", "the moments are forgotten after each step", forget_moments=True),
    Mistake("optimizer", "the master copy is kept in bfloat16", round_master=torch.bfloat16),
    *(
        Mistake("optimizer", f"{what} kept in {kind}", round_moments=dtype, rounded=which)
        for kind, dtype in (("bfloat16", torch.bfloat16), ("float16", torch.float16))
        for what, which in (
            ("the moments are", (True, True)),
            ("the first moment is", (True, False)),
            ("the second moment is", (False, True)),
        )
    ),
    Mistake("gather", "only every second step changes anything", every=2),
)
REST: tuple[Mistake, ...] = (
    Mistake(
        "backward",
        "gradients of earlier steps are still added: zero_grad is missing or clears too little",
        accumulate=lambda x: torch.ones(x.world_size, x.numel, dtype=torch.float64),
    ),
    Mistake("backward", "zero_grad clears only the parameters that a rank owns", accumulate=_not_owned),
    Mistake("gather", "parameters are one step late: gathered before they were updated", stale=True),
)
LOAD: tuple[Mistake, ...] = (
    Mistake("load", "the step count is not restored", reload=_lose("count")),
    Mistake("load", "the moments are not restored", reload=_lose("first", "second")),
    Mistake("load", "the second moment is not restored", reload=_lose("second")),
    Mistake("load", "the first moment is not restored", reload=_lose("first")),
    Mistake("load", "nothing is restored: neither moments nor step count", reload=_lose("first", "second", "count")),
    Mistake("load", "the step count is added to what was there", reload=_count_twice),
    Mistake("load", "the learning rate falls back to the constructor's", reload=_constructors_lr),
)
