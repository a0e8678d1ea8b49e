"""What the shape of a difference tells: what did not move, what is in another's place, who is right where.

Owns the reading of a wrong step that no known mistake reproduces. Parameters are looked at as one flat vector cut evenly over the
ranks, which is how most implementations own them; of one that cuts otherwise less is told.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from minigpt_dist.verify.flat_scenario import Flat, Layout
from minigpt_dist.verify.scenario import Scenario
from minigpt_dist.verify.wrong_adam import RIGHT, Simulation, close, fits

Finding = tuple[str, str]  # (stage, hint)


@functools.lru_cache(maxsize=32)
def right(at: Layout, step: int) -> Tensor:
    """The parameters (P,) after `step`, as they should be."""
    simulation = Simulation(RIGHT, at, 0)
    for _ in range(step):
        simulation.advance()
    return simulation.state.p.clone()


def standing(at: Layout, seen: Sequence[Sequence[Sequence[Tensor]]], flat: Flat, step: int) -> Finding | None:
    """What moved that should not, or did not and should: frozen tensors, whole tensors, everything. `seen[rank][step][tensor]`."""
    for i in at.scenario.frozen:
        if not torch.equal(seen[0][step][i], seen[0][step - 1][i]):
            return "optimizer", f"p{i}, which does not require a gradient, was changed"
    if all(fits(values[at_step], values[at_step - 1]) for values in flat for at_step in range(step, len(values))):
        if at.scenario.model_zero_grad:
            return "reduce", "nothing moves: the optimizer reads gradients of its own, which the module has let go of"
        return "gather", "nothing moves: the optimizer updates other tensors than the module's, or writes nothing back"
    wrong = ~close(flat[0][step], right(at, step))
    tensors = at.tensor[wrong].unique()
    whole = torch.isin(at.tensor, tensors)
    moved = any(not fits(b[whole], a[whole]) for a, b in zip(flat[0][step - 1 :], flat[0][step:], strict=False))
    if moved or len(tensors) in (0, len(at.tensors)) or not all(fits(values[step], flat[0][step]) for values in flat):
        return None
    if at.scenario.late and tensors.tolist() == [len(at.scenario.shapes) - 1]:
        return "optimizer", "the group added after construction is not optimized"
    return "optimizer", f"{', '.join(f'p{i}' for i in tensors.tolist())} did not move: left out of the update"


def misplaced(at: Layout, flat: Flat, step: int) -> Finding | None:
    """Ranks that disagree, and right values in the wrong place."""
    now, wanted = [values[step] for values in flat], right(at, step)
    if not all(fits(values, now[0]) for values in now):
        return _ranks_differ(at, now, flat[0][step - 1], wanted)
    for by in (1, -1, at.chunk, -at.chunk):
        inner = slice(abs(by), -abs(by))
        if 3 * abs(by) <= at.numel and fits(now[0].roll(-by)[inner], wanted[inner]):
            return "gather", f"parameters are written {abs(by)} elements {'behind' if by > 0 else 'before'} their place"
    return _joined_otherwise(at, now[0], wanted)


def _ranks_differ(at: Layout, now: Sequence[Tensor], before: Tensor, wanted: Tensor) -> Finding:
    owned = [at.owner == rank for rank in range(len(now))]
    if all(bool(close(values, wanted)[own].all()) for values, own in zip(now, owned, strict=True)):
        if all(bool(close(values, before)[~own].all()) for values, own in zip(now, owned, strict=True)):
            return "gather", "each rank sees only its own slice updated: nothing is gathered"
        return "gather", "each rank's own slice is right, and what it has of the others' is not"
    if bool(torch.stack([close(values, wanted) for values in now]).any(0).all()):
        return (
            "gather",
            "every element is right on some rank, but not on all: what the owner has does not reach everyone",
        )
    return "reduce", "ranks disagree after the step: they did not update with the same gradient"


def _joined_otherwise(at: Layout, now: Tensor, wanted: Tensor) -> Finding | None:
    """Slices of other ranks in a rank's place. Their ends may be padding, so that a piece is compared as far as both reach."""
    pieces, sources = now.split(max(at.chunk, 1)), wanted.split(max(at.chunk, 1))
    found = []
    for piece in pieces:
        like = [
            j
            for j, w in enumerate(sources)
            if (n := min(len(w), len(piece))) * 2 >= at.chunk and fits(piece[:n], w[:n])
        ]
        found.append(like[0] if like else None)
    known = [(k, j) for k, j in enumerate(found) if j is not None]
    if 2 * len(known) > len(pieces) > 1 and any(k != j for k, j in known):
        order = ", ".join("?" if j is None else str(j) for j in found)
        return "gather", f"slices are joined in another order than by rank: {order}"
    return None


def left_over(at: Layout, flat: Flat, step: int) -> Finding:
    """What can still be said where nothing fits: the condition that the scenario adds is to blame, or the size of the updates tells."""
    s, now, before, wanted = at.scenario, flat[0][step], flat[0][step - 1], right(at, step)
    wrong, moved = ~close(now, wanted), ~close(now, before)
    stage, hint = _condition(s, step)
    if bool(now.isnan().any()):
        return stage or "optimizer", "parameters are not numbers: something was divided by zero"
    if not bool(moved[wrong].any()):
        owners = at.owner[wrong].unique()
        if len(owners) == 1 and at.world_size > 1 and bool(wrong[at.owner == owners].all()):
            return "gather", f"the slice of rank {owners.item()} did not move: it was not updated, or did not arrive"
        rest = at.numel % at.world_size
        if rest and torch.equal(wrong.nonzero().flatten(), torch.arange(at.numel - rest, at.numel)):
            return "gather", f"the last {rest} elements, which {at.numel} / {at.world_size} leaves over, did not move"
        return stage or "optimizer", f"{int(wrong.sum())} elements did not move: left out of the update"
    if stage:
        return stage, hint
    factor = ((now - before)[wrong] / (wanted - before)[wrong]).median()
    if bool(close(before + factor * (wanted - before), now).all()):
        return "optimizer", f"each update is {float(factor):.4g} times the right one"
    size = (now - before).abs() / s.lr
    of_adams = bool((size <= 1.0001).all()) and float((size > 0.99).double().mean()) > 0.5
    if step == 1 and not s.weight_decay and of_adams:
        return (
            "reduce",
            "updates have the size of Adam's first step, at most lr, but other values: the gradient is not the mean",
        )
    return "optimizer", ""


def _condition(s: Scenario, step: int) -> Finding:
    """The stage that a scenario's own condition puts to the test at `step`: without that condition the check `plain` asks."""
    if s.reload_at and step == s.reload_at + 1:
        return "load", "the first update after loading is wrong: something that steers it was not restored"
    if s.snapshots and step > 1:
        return "save", "asking for the state changed the optimizer"
    if s.max_norm:
        return "clip", "the gradient is not scaled as by the norm over all ranks' slices"
    if s.absent and step >= s.absent_from:
        return "reduce", "a parameter without a gradient on some rank is wrong"
    if s.backwards > 1 or s.keep_grads_before or s.model_zero_grad or s.transposed:
        return "reduce", ""
    return "", ""
