"""A rank's slice of a flat vector inside its state: how it is recognised, checked and cut for another world size.

A slice is a mapping anywhere under `state["optimizer"]` with the ints `offset`, `numel` and `total`: its tensors
`master`, `exp_avg` and `exp_avg_sq` hold elements [offset, offset + numel) of `total`, then padding, if any.
What else it holds is the same on all ranks.

Owns the description and the rule of the cut. Leaves moving the elements to `reshard`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from minigpt_dist.checkpoint.state import child_pointer

__all__ = ["SLICED_NAMES", "FlatSlice", "find_slices", "rank_slice"]

SLICED_NAMES = ("master", "exp_avg", "exp_avg_sq")
SLICE_KEYS = ("offset", "numel", "total")


@dataclass(frozen=True)
class FlatSlice:
    """Elements [offset, offset + numel) of a flat vector of `total` elements, padding not counted."""

    offset: int
    numel: int
    total: int


def rank_slice(rank: int, world_size: int, total: int) -> FlatSlice:
    """Which of `total` elements are `rank`'s: chunks of ceil(total / world_size), the last ones short or empty."""
    chunk = -(-total // world_size)
    start = min(rank * chunk, total)
    return FlatSlice(start, min(start + chunk, total) - start, total)


def find_slices(state: Mapping[str, Any]) -> dict[str, FlatSlice]:
    """Every slice under `state["optimizer"]` by its place, a JSON pointer such as "/optimizer/shards/0".

    Raises:
        ValueError: a slice outside its vector, or a tensor in it that is not 1-D or shorter than `numel`.
    """
    return dict(_walk(state.get("optimizer"), "/optimizer"))


def _walk(node: Any, place: str) -> Iterator[tuple[str, FlatSlice]]:
    if isinstance(node, Mapping) and all(type(node.get(key)) is int for key in SLICE_KEYS):
        yield place, _checked(node, place)
    elif isinstance(node, Mapping):
        for key, value in node.items():
            yield from _walk(value, child_pointer(place, key))
    elif isinstance(node, (list, tuple)):
        for i, value in enumerate(node):
            yield from _walk(value, f"{place}/{i}")


def _checked(node: Mapping[str, Any], place: str) -> FlatSlice:
    part = FlatSlice(node["offset"], node["numel"], node["total"])
    if part.offset < 0 or part.numel < 0 or part.offset + part.numel > part.total:
        raise ValueError(f"state{place}: {part} is not inside its vector")
    for name in SLICED_NAMES:
        tensor = node.get(name)
        if isinstance(tensor, torch.Tensor) and (tensor.dim() != 1 or len(tensor) < part.numel):
            raise ValueError(f"state{place}/{name}: shape {tuple(tensor.shape)} cannot hold {part.numel} flat elements")
    return part
