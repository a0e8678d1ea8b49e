"""The shape of a difference: what is there instead of what should be there.

Owns the list of known shapes of a wrong gradient or a wrong vector (a factor, a missing share, a shift, a stale value,
padding, one rank's slice) and the words for them. A guess at the cause: no verdict depends on it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

# Types that gradients travel in by mistake, with the relative error of a sum of a few numbers.
ROUNDED = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-9}
SHIFTS = (1, -1, 2, -2)
Candidate = tuple[str, list[Tensor], list[Tensor]]  # cause, each rank's vector, its bound


def wrong_means(
    shares: Tensor, loose: Tensor, previous: Tensor | None, owner: Tensor, micro_batches: int
) -> Iterator[tuple[str, list[Tensor], Tensor]]:
    """(cause, gradient on each rank, how far it may be off) of each known wrong way to average, all (P,).

    shares: (N, P), each rank's gradient divided by N. loose: how far their sum may be off. previous: the mean one step
    before.
    """
    N, mean = len(shares), shares.sum(0)
    for cause, grad in _wrong_sums(shares, previous, owner, micro_batches):
        yield cause, [grad] * N, loose + 1e-5 * grad.abs()
    if N > 1:
        yield "each rank uses its own gradient: nothing is reduced", [s * N for s in shares], loose * N
    for kind, relative in ROUNDED.items():
        grad = (shares * N).to(kind).double().sum(0) / N
        cause = f"rounded to {str(kind).removeprefix('torch.')} on the way"
        yield cause, [grad] * N, loose + relative * shares.abs().sum(0) + 2.0**-25 * (kind is torch.float16)
    for by in SHIFTS:
        yield _shift_words(by), [shifted(mean, by)] * N, shifted(loose, by) + loose
    yield "the elements are in reversed order", [mean.flip(0)] * N, loose.flip(0) + loose
    for factor in {2.0, 0.5, 4.0, 0.25, N / 4} - {1.0, N, 1 / N, micro_batches, 1 / micro_batches}:
        yield f"a factor {factor:g}", [mean * factor] * N, loose * factor + 1e-5 * mean.abs()


def _wrong_sums(
    shares: Tensor, previous: Tensor | None, owner: Tensor, micro_batches: int
) -> Iterator[tuple[str, Tensor]]:
    N, mean = len(shares), shares.sum(0)
    if N > 1:
        yield f"a factor N = {N}: summed, but not divided", mean * N
        yield f"a factor 1/N = 1/{N}: divided by the number of ranks twice", mean / N
        for r in range(N):
            yield f"the share of rank {r} is missing", mean - shares[r]
            yield f"the share of rank {r} is missing, from the divisor too", (mean - shares[r]) * N / (N - 1)
        for r in range(N):
            yield f"only rank {r}'s gradient counts", shares[r] * N
            yield f"only rank {r}'s share of the sum is there", shares[r]
        own = shares.gather(0, owner.clamp(max=N - 1)[None])[0]
        yield "the owner of each slice uses its own gradient: nothing is reduced", own * N
        yield "the owner's own share counts twice", mean + own
        yield "the largest gradient of the ranks is used, and no mean", (shares * N).amax(0)
    if micro_batches > 1:
        yield f"a factor M = {micro_batches}: summed over micro-batches, but not divided", mean * micro_batches
        yield f"a factor 1/M = 1/{micro_batches}: divided by the micro-batches twice", mean / micro_batches
    yield "the gradient is zero", torch.zeros_like(mean)
    if previous is not None:
        yield "one step late: the gradient of the step before", previous
        yield "the gradient of the step before is added", mean + previous


def _shift_words(by: int) -> str:
    return f"shifted by {abs(by)} element{'s' * (abs(by) > 1)} {'forward' if by > 0 else 'back'}"


def shifted(vector: Tensor, by: int) -> Tensor:
    """`vector` moved by `by` places, zeros where nothing comes."""
    moved = torch.zeros_like(vector)
    if by > 0:
        moved[by:] = vector[:-by]
    else:
        moved[:by] = vector[-by:]
    return moved


def shape_of(
    seen: Tensor, wanted: Tensor, wrong: Tensor, before: Tensor | None, owner: Tensor, alone: bool = False
) -> str:
    """The known shape of a wrong vector (P,), or "". `before`: what was seen one step earlier.

    alone: nothing else is known (two runs are compared): a constant factor counts as a shape too.
    """
    at = wrong.nonzero().flatten()
    if not len(at):
        return ""
    where = region(at, wrong.numel(), owner)
    if bool(seen[at].isnan().any()):
        return f"not a number: a division by zero, or inf - inf{where}"
    if before is not None and bool((seen[at] == before[at]).all()):
        return f"equal to the value before the step (stale){where}"
    if bool((seen[at] == 0).all()):
        return f"zeros{where}"
    inner = slice(max(SHIFTS), -max(SHIFTS))  # below, closeness chooses words for a difference that is already found
    for by in SHIFTS:
        if len(wrong) > 8 and torch.allclose(seen[inner], shifted(wanted, by)[inner], rtol=1e-6, atol=1e-12):
            return _shift_words(by)
    if alone:
        factor = seen[at] / wanted[at]
        middle = float(factor.median())
        if bool(((factor - middle).abs() <= 1e-4 * abs(middle)).all()) and abs(middle - 1) > 1e-3:
            return f"a factor {middle:.4g}{where}"
    return where.removeprefix(", ")


def region(at: Tensor, numel: int, owner: Tensor) -> str:
    """ ", only ...": which part of the vector is wrong, if it is a telling one."""
    if len(at) == numel or not len(at):
        return ""
    if int(at[0]) >= numel - 8 and numel > 64:
        return f", only the last element{'s' * (len(at) > 1)} ({len(at)}): padding"
    owners = owner[at].unique().tolist()
    if len(owners) == 1 and int(owner.max()) > 0:
        return f", only in the slice that rank {owners[0]} owns"
    return ""


def best_match(seen: Sequence[Tensor], candidates: Iterator[Candidate], wrong: Tensor, owner: Tensor) -> str:
    """The cause that explains every rank's vector, or just the part that is wrong, and does so best. "" if none does.

    Several can: Adam's first step is the same for every gradient far above eps.
    """
    where = region(wrong.nonzero().flatten(), wrong.numel(), owner)
    found: list[tuple[float, str]] = []
    for cause, vectors, bounds in candidates:
        off = torch.stack([(values - vector).abs() for values, vector in zip(seen, vectors, strict=True)])
        right = off <= torch.stack(bounds)
        if bool(right.all()):
            found.append((float(off.sum()), cause))
        elif where and bool(right[:, wrong].all()):
            found.append((float(off[:, wrong].sum()), cause + where))
    return min(found)[1] if found else ""
