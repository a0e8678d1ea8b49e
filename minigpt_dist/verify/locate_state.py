"""What the leaves of an optimizer's state_dict are: a first moment, a second, a master copy, and of which elements.

Owns the reading of names, and finding a slice by its values wherever an implementation cut it. Used to tell stages
apart and not for the verdict on an update.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

State = Mapping[str, Tensor]
_NAMES = {
    "second": ("exp_avg_sq", "exp_avg_sqs", "v", "variance", "second_moment", "second"),
    "first": ("exp_avg", "exp_avgs", "m", "momentum", "first_moment", "first"),
    "master": ("master", "masters", "fp32", "master_params", "master_weights", "shard", "param_shard", "params"),
}


def kind_of_state(path: str) -> str:
    """ "first", "second" or "master", by a word of the path; "" for anything else."""
    words = path.split(".")
    return next((kind for kind, names in _NAMES.items() if any(word in names for word in words)), "")


def in_order(names: Sequence[str]) -> list[str]:
    """Names in the order in which a step writes them: first moments, second, the rest, master copies."""
    rank = {"first": 0, "second": 1, "": 2, "master": 3}
    return sorted(names, key=lambda name: rank[kind_of_state(name)])


def leaves_of_kind(state: State, kind: str) -> dict[str, Tensor]:
    """The floating-point tensors of one kind, each as a vector, in float64."""
    floats = {name: t for name, t in state.items() if t.is_floating_point() and t.numel()}
    return {name: t.double().flatten() for name, t in floats.items() if kind_of_state(name) == kind}


def start_of(leaf: Tensor, whole: Tensor, bound: Tensor) -> int | None:
    """Where in `whole` (P,) the run of neighbours begins that `leaf` is, within `bound` (P,); None if nowhere.

    What of the leaf exceeds the end must be zeros: padding.
    """
    filled = int(leaf.nonzero().max()) + 1 if bool(leaf.any()) else 0
    anchor = int(leaf.abs().argmax())  # the largest value is the one least likely to stand twice
    for place in ((whole - leaf[anchor]).abs() <= bound).nonzero().flatten().tolist():
        start = int(place) - anchor
        end = min(start + len(leaf), len(whole))
        fits = start >= 0 and end - start >= filled
        if fits and bool(((leaf[: end - start] - whole[start:end]).abs() <= bound[start:end]).all()):
            return start
    return None


@dataclass(frozen=True)
class Coverage:
    """What all ranks' leaves of a kind say about a vector (P,). seen: is there such a leaf? fits: is each a slice of the
    vector? covered: the elements that are in one of them."""

    seen: bool
    fits: bool
    covered: Tensor

    @property
    def right(self) -> bool | None:
        """Is the whole vector there? None if nothing is to be seen."""
        return self.fits and bool(self.covered.all()) if self.seen else None


def coverage(states: Sequence[State], kind: str, whole: Tensor, bound: Tensor) -> Coverage:
    """Find every rank's leaves of a kind in `whole`. Elements that are zero within `bound` need no owner."""
    covered, fits, seen = whole.abs() <= bound, True, False
    for state in states:
        for leaf in leaves_of_kind(state, kind).values():
            seen = True
            if not bool(leaf.any()):
                continue  # padding, or nothing that tells
            start = start_of(leaf, whole, bound)
            fits = fits and start is not None
            if start is not None:
                covered[start : start + len(leaf)] = True
    return Coverage(seen, fits, covered)


def coarse(state: State, kind: str) -> str:
    """ "bfloat16" or "float16" if every leaf of the kind holds only such numbers; else ""."""
    leaves = leaves_of_kind(state, kind).values()
    for dtype in (torch.bfloat16, torch.float16):
        exact = all(bool((leaf.to(dtype).double() == leaf).all()) for leaf in leaves)
        if exact and any(bool(leaf.any()) for leaf in leaves):
            return str(dtype).removeprefix("torch.")
    return ""
