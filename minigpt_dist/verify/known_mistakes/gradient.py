"""Mistakes in the gradient that the optimizer is given: its sum over ranks and backwards, its order, its clipping."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from minigpt_dist.verify.flat_scenario import Layout, Step
from minigpt_dist.verify.wrong_adam import Mistake


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
