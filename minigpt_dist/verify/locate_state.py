"""What the leaves of an optimizer's state_dict are: which is a first moment, which a second, which a master copy, and of which elements.

Owns the reading of names, and finding a slice by its values wherever an implementation cut it. Used to tell stages apart, never for a verdict.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

_NAMES = {
    "second": ("exp_avg_sq", "exp_avg_sqs", "v", "variance", "second_moment", "second"),
    "first": ("exp_avg", "exp_avgs", "m", "momentum", "first_moment", "first"),
    "master": ("master", "masters", "fp32", "master_params", "master_weights", "shard", "param_shard", "params"),
}


def kind_of_state(path: str) -> str:
    """ "first", "second" or "master", by a word of the path; "" for anything else."""
    words = path.split(".")
    return next((kind for kind, names in _NAMES.items() if any(word in names for word in words)), "")


def leaves_of_kind(state: Mapping[str, Tensor], kind: str) -> list[Tensor]:
    """The floating-point tensors of one kind, each as a vector, in float64."""
    return [
        t.double().flatten()
        for name, t in state.items()
        if kind_of_state(name) == kind and t.is_floating_point() and t.numel()
    ]


def is_slice(leaf: Tensor, whole: Tensor, bound: Tensor) -> bool | None:
    """Is `leaf` a run of neighbours of `whole` (P,), within `bound` (P,)? What exceeds the end must be zeros. None if it is all zeros."""
    return None if not bool(leaf.any()) else start_of(leaf, whole, bound) is not None


def start_of(leaf: Tensor, whole: Tensor, bound: Tensor) -> int | None:
    """Where in `whole` the run of neighbours begins that `leaf` is; None if nowhere."""
    filled = int(leaf.nonzero().max()) + 1 if bool(leaf.any()) else 0  # beyond: padding, or zeros
    for start in ((whole - leaf[0]).abs() <= bound).nonzero().flatten().tolist():
        end = min(start + len(leaf), len(whole))
        if end - start >= filled and bool(((leaf[: end - start] - whole[start:end]).abs() <= bound[start:end]).all()):
            return int(start)
    return None


def all_slices(state: Mapping[str, Tensor], kind: str, whole: Tensor, bound: Tensor) -> bool | None:
    """Do all leaves of a kind lie in `whole`? None if there are none that tell."""
    found = [is_slice(leaf, whole, bound) for leaf in leaves_of_kind(state, kind)]
    told = [f for f in found if f is not None]
    return all(told) if told else None


def coarse(state: Mapping[str, Tensor], kind: str) -> str:
    """ "bfloat16" or "float16" if every leaf of the kind holds only such numbers; else ""."""
    leaves = leaves_of_kind(state, kind)
    for dtype in (torch.bfloat16, torch.float16):
        if (
            leaves
            and any(bool(leaf.any()) for leaf in leaves)
            and all(bool((leaf.to(dtype).double() == leaf).all()) for leaf in leaves)
        ):
            return str(dtype).removeprefix("torch.")
    return ""
