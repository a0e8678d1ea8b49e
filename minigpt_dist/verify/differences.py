"""What the shape of a difference tells: who is right where, what did not move, what is in another's place.

Owns the reading of a wrong step that no known mistake reproduces. The parameters are looked at as one flat vector cut evenly over
the ranks, which is how most implementations own them; one that cuts otherwise is told less.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from minigpt_dist.verify.wrong_adam import FIT, RIGHT, Layout, Simulation, fits

Flat = Sequence[Sequence[Tensor]]


def read(at: Layout, seen: Sequence[Sequence[Sequence[Tensor]]], flat: Flat, step: int) -> tuple[str, str]:
    """(stage, hint) for the first wrong step. `seen[rank][step][tensor]`, `flat[rank][step]` as one vector (P,)."""
    for i in at.scenario.frozen:
        if not torch.equal(seen[0][step][i], seen[0][step - 1][i]):
            return "optimizer", f"p{i}, which does not require a gradient, was changed"
    simulation = Simulation(RIGHT, at, 0)
    for _ in range(step):
        right = simulation.advance()
    now, before = [rank[step] for rank in flat], flat[0][step - 1]
    if all(fits(values, now[0]) for values in now):
        return _all_alike(at, now[0], before, right, step)
    return _ranks_differ(at, now, before, right)


def _close(a: Tensor, b: Tensor) -> Tensor:
    return (a - b).abs() <= FIT


def _ranks_differ(at: Layout, now: Sequence[Tensor], before: Tensor, right: Tensor) -> tuple[str, str]:
    owned = [at.owner == rank for rank in range(len(now))]
    if all(bool(_close(values, right)[own].all()) for values, own in zip(now, owned, strict=True)):
        if all(bool(_close(values, before)[~own].all()) for values, own in zip(now, owned, strict=True)):
            return "gather", "each rank sees only its own slice updated: nothing is gathered"
        return "gather", "each rank's own slice is right, and what it has of the others' is not"
    if bool(torch.stack([_close(values, right) for values in now]).any(0).all()):
        return "gather", "every element is right on some rank, but not on all: what the owner has does not reach everyone"
    return "reduce", "ranks disagree after the step: they did not update with the same gradient"


def _all_alike(at: Layout, now: Tensor, before: Tensor, right: Tensor, step: int) -> tuple[str, str]:
    """All ranks show the same wrong values."""
    s, wrong, moved = at.scenario, ~_close(now, right), ~_close(now, before)
    if s.reload_at and step == s.reload_at + 1:
        return "load", "the first update after loading is wrong: something that steers it was not restored"
    if not bool(moved.any()):
        return "gather", "no parameter moved in this step: the optimizer updates other tensors than the module's, or nothing is written back"
    if bool(now.isnan().any()):
        return "optimizer", "parameters are not numbers: something was divided by zero"
    place = _other_place(at, now, right)
    if place:
        return "gather", place
    owners, tensors = at.owner[wrong].unique().tolist(), at.tensor[wrong].unique().tolist()
    still = not bool(moved[wrong].any())
    if still and s.late and tensors == [len(s.shapes) - 1]:
        return "optimizer", "the group added after construction is not optimized"
    if still and len(tensors) < len(at.tensors):
        return "optimizer", f"{', '.join(f'p{i}' for i in tensors)} did not move: left out of the update"
    if len(owners) == 1 and at.world_size > 1:
        doing = "did not move: it was not updated, or did not arrive" if still else "is wrong"
        return "gather" if still else "optimizer", f"only the slice of rank {owners[0]} {doing}"
    factor = ((now - before)[wrong] / (right - before)[wrong]).median()
    if bool(_close(before + factor * (right - before), now).all()):
        return "optimizer", f"each update is {float(factor):.4g} times the right one"
    return "optimizer", ""


def _other_place(at: Layout, now: Tensor, right: Tensor) -> str:
    """Are the right values there, but elsewhere?"""
    for by in (1, -1, at.chunk, -at.chunk):
        if 3 * abs(by) <= at.numel and fits(now.roll(-by)[abs(by) : -abs(by) or None], right[abs(by) : -abs(by) or None]):
            return f"parameters are written {abs(by)} elements {'behind' if by > 0 else 'before'} their place"
    pieces, wanted = now.split(max(at.chunk, 1)), right.split(max(at.chunk, 1))
    sources = [next((j for j, w in enumerate(wanted) if w.shape == piece.shape and fits(piece, w)), None) for piece in pieces]
    found = [j for j in sources if j is not None]
    if len(found) >= len(pieces) - 1 and found != sorted(found):
        return f"slices are joined in another order than by rank: {', '.join(map(str, found))}"
    return ""
