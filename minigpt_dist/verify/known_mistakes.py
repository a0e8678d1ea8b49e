"""The well-known ways to get a sharded optimizer wrong, each as what it would do instead.

Owns the list. Leaves looking for the one that explains what was seen to `mistakes.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from minigpt_dist.verify.flat_scenario import Layout, Step
from minigpt_dist.verify.wrong_adam import Mistake, State


def _without(dropped: int) -> Callable[[Step], Tensor]:
    """The mean, with the share of one rank counted as zero."""
    return lambda x: (x.local.sum(0) - x.local[dropped]) / x.layout.world_size


def _first_ranks(count: int) -> Callable[[Step], Tensor]:
    """The mean, with the shares of all but the first `count` ranks counted as zero."""
    return lambda x: x.local[:count].sum(0) / x.layout.world_size


def _shifted(by: int) -> Callable[[Step], Tensor]:
    """The mean of the gradient `by` elements further on; zero where there is none."""

    def grad(x: Step) -> Tensor:
        result = torch.zeros_like(x.mean)
        if by > 0:
            result[: max(x.layout.numel - by, 0)] = x.mean[by:]
        else:
            result[-by:] = x.mean[: max(x.layout.numel + by, 0)]
        return result

    return grad


def _without_last(x: Step) -> Tensor:
    mean = x.mean.clone()
    mean[-1:] = 0
    return mean


def _clipped_first(x: Step) -> Tensor:
    """Each rank clips its own gradient, then the mean is taken."""
    limit = x.layout.scenario.max_norm or float("inf")
    return torch.stack([g * min(limit / (float(g.norm()) + 1e-6), 1.0) for g in x.local]).mean(0)


def _by_own_slice(x: Step, used: Tensor, limit: float) -> Tensor:
    """Each rank clips by the norm of its own slice."""
    square = torch.zeros(x.layout.world_size, dtype=used.dtype).index_add_(0, x.layout.owner, used.square())
    return (limit / (square.sqrt() + 1e-6)).clamp(max=1.0)[x.layout.owner]


def _by_tensor(x: Step, used: Tensor, limit: float) -> Tensor:
    """Each tensor is clipped by its own norm."""
    square = torch.zeros(len(x.layout.scenario.shapes), dtype=used.dtype).index_add_(0, x.layout.tensor, used.square())
    return (limit / (square.sqrt() + 1e-6)).clamp(max=1.0)[x.layout.tensor]


def _memory_order(flat: Tensor, x: Layout) -> Tensor:
    """Each matrix of a flat vector as it lies in memory when it is stored transposed."""
    result = flat.clone()
    for i in x.tensors:
        shape = x.scenario.shapes[i]
        if len(shape) == 2:
            result[x.tensor == i] = flat[x.tensor == i].view(shape).t().reshape(-1)
    return result


def _sums_stay(x: Step) -> Tensor:
    """The mean of the new gradient, and the whole of a sum over ranks that was left standing."""
    return x.mean + x.kept.sum(0) - x.kept.mean(0)


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


REDUCE: tuple[Mistake, ...] = (
    Mistake("reduce", "gradients are summed over ranks but not divided by N", lambda x: x.local.sum(0)),
    Mistake("reduce", "gradients are divided by N twice", lambda x: x.mean / x.layout.world_size),
    Mistake("reduce", "divided by N-1 instead of N", lambda x: x.local.sum(0) / max(x.layout.world_size - 1, 1)),
    Mistake("reduce", "each rank uses its own gradient: nothing is reduced", lambda x: x.local[x.rank], alone=True),
    Mistake(
        "reduce",
        "each slice is updated with the gradient of the rank that owns it: nothing is reduced",
        lambda x: x.owners,
    ),
    Mistake("reduce", "only rank 0's gradient is used", lambda x: x.local[0]),
    Mistake("reduce", "only the last rank's gradient is used", lambda x: x.local[-1]),
    Mistake("reduce", "the share of rank 0 is missing from the mean", _without(0)),
    Mistake(
        "reduce", "the share of rank 1 is missing from the mean", lambda x: _without(min(1, x.layout.world_size - 1))(x)
    ),
    Mistake("reduce", "the share of the last rank is missing from the mean", _without(-1)),
    Mistake(
        "reduce",
        "the share of the rank that owns the slice is missing from the mean",
        lambda x: x.mean - x.owners / x.layout.world_size,
    ),
    Mistake("reduce", "the owner's share counts twice", lambda x: x.mean + x.owners / x.layout.world_size),
    Mistake("reduce", "the share of rank 0 counts twice", lambda x: x.mean + x.local[0] / x.layout.world_size),
    Mistake("reduce", "the largest gradient over ranks is used, not the mean", lambda x: x.local.amax(0)),
    Mistake("reduce", "the smallest gradient over ranks is used, not the mean", lambda x: x.local.amin(0)),
    Mistake("reduce", "gradients travel in bfloat16", lambda x: x.local.bfloat16().double().mean(0)),
    Mistake("reduce", "gradients travel in float16", lambda x: x.local.half().double().mean(0)),
    Mistake("reduce", "gradients are in another order than the parameters: reversed", lambda x: x.mean.flip(0)),
    Mistake("reduce", "gradients are one element behind their parameters", _shifted(1)),
    Mistake("reduce", "gradients are one element ahead of their parameters", _shifted(-1)),
    Mistake("reduce", "the gradient of the last element is lost: it was taken for padding", _without_last),
    Mistake(
        "reduce",
        "gradients of the step before are used",
        lambda x: torch.zeros_like(x.mean) if x.earlier is None else x.earlier.mean(0),
    ),
    Mistake("reduce", "only the last backward before the step counts", lambda x: x.parts[-1].mean(0)),
    Mistake("reduce", "only the first backward before the step counts", lambda x: x.parts[0].mean(0)),
    Mistake("reduce", "the mean over backwards is taken, but they should add up", lambda x: x.mean / len(x.parts)),
    Mistake(
        "reduce",
        "a sum that was exchanged already is exchanged again with the next backward",
        lambda x: x.parts[-1].mean(0) + sum(part.mean(0) for part in x.parts[:-1]) * x.layout.world_size,
    ),
)
FACTORS = tuple(
    Mistake("reduce", f"gradients are {name} times the mean", lambda x, of=of: of(x.layout.world_size) * x.mean)  # type: ignore[misc]  # bound early
    for name, of in (
        ("N*N", lambda N: N * N),
        ("1/N*N", lambda N: N**-2),
        ("2", lambda N: 2),
        ("1/2", lambda N: 0.5),
        ("4", lambda N: 4),
        ("1/4", lambda N: 0.25),
        ("8", lambda N: 8),
        ("1/8", lambda N: 0.125),
    )
)
CLIP: tuple[Mistake, ...] = (
    Mistake("clip", "the gradient is not clipped", clip=lambda x, used, limit: 1.0),
    Mistake("clip", "each rank clips by the norm of its own slice, not by that of all", clip=_by_own_slice),
    Mistake("clip", "each tensor is clipped by its own norm, not by that of all", clip=_by_tensor),
    Mistake(
        "clip",
        "the gradient is scaled to the limit although its norm is below it",
        clip=lambda x, used, limit: limit / (float(used.norm()) + 1e-6),
    ),
    Mistake(
        "clip", "each rank clips its own gradient before the mean", _clipped_first, clip=lambda x, used, limit: 1.0
    ),
    Mistake(
        "clip",
        "the norm is that of the sum over ranks, not of the mean",
        clip=lambda x, used, limit: min(limit / (float(used.norm()) * x.layout.world_size + 1e-6), 1.0),
    ),
    Mistake(
        "clip",
        "the root of the squared norm is missing",
        clip=lambda x, used, limit: min(limit / (float(used.square().sum()) + 1e-6), 1.0),
    ),
)
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
# Mistakes that only a scenario's own condition brings out; there they come first.
CONDITIONS: dict[str, tuple[Mistake, ...]] = {
    "transposed": (
        Mistake(
            "reduce",
            "gradients that are not contiguous are flattened in memory order",
            lambda x: _memory_order(x.mean, x.layout),
        ),
    ),
    "keep_grads_before": (
        Mistake("reduce", "sums over ranks stay in the gradients, and the next backward adds to them", _sums_stay),
    ),
    "closure": (
        *(
            Mistake(
                "backward",
                f"only the first {k} ranks' gradients count: the others evaluate no closure",
                _first_ranks(k),
            )
            for k in (1, 2, 3)
        ),
        Mistake(
            "backward", "the closure's gradients count twice: it is evaluated more than once", lambda x: 2 * x.mean
        ),
    ),
    "max_norm": CLIP,
}
MISTAKES = (*REDUCE, *FACTORS, *CLIP, *OPTIMIZER, *REST, *LOAD)
