"""The whole of a model and its optimizer's state, put together from what each rank of some layout saved, one rank at a time.

Every element is written where the unsharded model has it, whichever axis the rank's share was cut along: a slice of a flat vector,
parts of tensors within it, the layers of a stage. Owns that each element is there, once in each data-parallel group, and with the same
bytes on all ranks that hold it. Leaves which elements a new layout wants to `relayout`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from minigpt_dist.checkpoint.flat_slice import SLICED_NAMES, FlatSlice, find_slices
from minigpt_dist.checkpoint.reshard import COUNTS, PER_RANK, check_same
from minigpt_dist.checkpoint.shard_file import as_bytes
from minigpt_dist.checkpoint.state import State
from minigpt_dist.parts import Part, Parts

__all__ = ["PARTS", "Whole", "pieces"]

PARTS = "parts"  # where a state says what its rank holds
# All that is in an optimizer's shard, and known how to move.
SLICE_KEYS = {"offset", "numel", "total", *SLICED_NAMES, COUNTS}


class Whole:
    """Whole tensors by kind ("model", "master", "exp_avg", "exp_avg_sq") and the unsharded model's name.

    wanted: names and whole shapes to keep; those of other names are only checked for their sizes. None keeps all.
    `counts` has the updates of each parameter, `rest` what the first rank's state has beside tensors, `parts` all ranks' descriptions.
    """

    def __init__(self, wanted: Mapping[str, tuple[int, ...]] | None = None) -> None:
        self.wanted = wanted
        self.tensors: dict[str, dict[str, Tensor]] = {}
        self.counts: dict[str, int] = {}
        self.rest: State = {}
        self.parts: list[Parts] = []
        # By kinds and name: 1 + the first rank that brought each element, 0 for none yet.
        self._owners: dict[tuple[str, ...], Tensor] = {}
        self._slices: dict[tuple[str, int], list[tuple[FlatSlice, int]]] = {}

    def add(self, state: State) -> None:
        """Take in the next rank's state. ValueError, naming tensor and ranks, for what does not fit to itself or to the ranks before."""
        rank, parts = len(self.parts), Parts.from_plain(state.get(PARTS))
        model, shards = state["model"], state["optimizer"]["shards"]
        if list(model) != list(parts.tensors) or len(shards) != len(parts.vectors):
            raise ValueError(f"rank {rank} holds other tensors or vectors than its parts say")
        rest = _without_own(state)
        self.rest = self.rest or rest
        check_same(self.rest, rest, rank)
        for name, part in parts.tensors.items():
            if model[name].shape != part.held_shape:
                raise ValueError(f"rank {rank}: {name} has shape {tuple(model[name].shape)}, not {(*part.held_shape,)}")
            self._put(parts.origin(name), part, 0, {"model": model[name].reshape(-1)}, rank)
        group = json.dumps(parts.to_plain(), sort_keys=True)
        for i, (shard, mine) in enumerate(zip(shards, _slices_of(state), strict=True)):
            self._slices.setdefault((group, i), []).append((mine, rank))
            self._add_vector(parts, parts.vectors[i], shard, mine, rank)
        self.parts.append(parts)

    def check(self) -> None:
        """ValueError if anything is missing, or was there twice."""
        for (_, i), slices in self._slices.items():
            _check_partition(i, slices)
        for (kind, *_, name), owners in self._owners.items():
            found = int((owners > 0).sum())
            if found < owners.numel():
                raise ValueError(f"expected all {owners.numel()} elements of {kind} {name}, found {found}")

    def _add_vector(
        self, parts: Parts, names: tuple[str, ...], shard: Mapping[str, Any], mine: FlatSlice, rank: int
    ) -> None:
        total = sum(parts.tensors[name].numel for name in names)
        if mine.total != total or len(shard[COUNTS]) != len(names):
            found = f"{mine.total} elements of {len(shard[COUNTS])} parameters"
            raise ValueError(f"rank {rank}: a vector has {found}, but its parts have {total} elements of {len(names)}")
        for name, count in zip(names, shard[COUNTS], strict=True):
            known = self.counts.get(parts.origin(name), 0)
            if known and count and known != count:
                raise ValueError(f"rank {rank}: {name} has {count} updates, but {known} on another rank")
            self.counts[parts.origin(name)] = known or count
        for name, first, start, stop in pieces(parts, names, mine):
            values = {kind: shard[kind][start:stop] for kind in SLICED_NAMES}
            self._put(parts.origin(name), parts.tensors[name], first, values, rank)

    def _put(self, name: str, part: Part, first: int, values: Mapping[str, Tensor], rank: int) -> None:
        """Take in, by kind, what a rank holds of the tensor `name`: elements from `first` on of its `part`."""
        if self.wanted is not None and name not in self.wanted:
            return
        if self.wanted is not None and part.shape != self.wanted[name]:
            raise ValueError(
                f"rank {rank}: the whole {name} has shape {part.shape}, but should have {self.wanted[name]}"
            )
        places = _places(part)[first : first + len(next(iter(values.values())))]
        own, at = places >= 0, places[places >= 0]
        owners = self._owners.setdefault((*values, name), torch.zeros(part.shape, dtype=torch.int32).view(-1))
        for kind, flat in values.items():
            whole = self.tensors.setdefault(kind, {}).setdefault(name, torch.zeros(part.shape, dtype=flat.dtype))
            if whole.shape != part.shape or whole.dtype != flat.dtype:
                seen, known = f"{part.shape} of {flat.dtype}", f"{tuple(whole.shape)} of {whole.dtype}"
                raise ValueError(f"rank {rank}: {kind} {name} is {seen}, but {known} on the ranks before")
            _write(whole.view(-1), at, flat[own], owners, rank, f"{kind} {name}")
        owners[at] = torch.where(owners[at] > 0, owners[at], rank + 1)


def _write(whole: Tensor, at: Tensor, flat: Tensor, owners: Tensor, rank: int, what: str) -> None:
    """Put `flat` into places `at` of the whole. ValueError if a rank before has put other bytes there."""
    before = owners[at]
    differs = (before > 0) & (_rows(whole[at]) != _rows(flat)).any(1)
    if differs.any():
        other = int(before[differs][0]) - 1
        raise ValueError(f"expected the same bytes of {what} on ranks {other} and {rank}, which differ")
    whole[at] = flat


def pieces(parts: Parts, names: tuple[str, ...], mine: FlatSlice) -> Iterator[tuple[str, int, int, int]]:
    """Of each parameter in a slice of a flat vector: its name, its first element there, and where in the slice that starts and stops."""
    begin = 0
    for name in names:
        end = begin + parts.tensors[name].numel
        start, stop = max(begin, mine.offset), min(end, mine.offset + mine.numel)
        if start < stop:
            yield name, start - begin, start - mine.offset, stop - mine.offset
        begin = end


def _places(part: Part) -> Tensor:
    """Where in the flat whole each element of the flat part lies; -1 for padding."""
    whole = torch.arange(1, 1 + torch.Size(part.shape).numel()).view(part.shape)
    return part.held(whole).reshape(-1) - 1  # padding is zeros


def _rows(flat: Tensor) -> Tensor:
    """(n,) of any dtype to its bytes, (n, item size)."""
    return as_bytes(flat).view(len(flat), flat.element_size())


def _slices_of(state: State) -> list[FlatSlice]:
    """The place of each shard's slice. ValueError for a shard that holds anything else than what a slice is made of."""
    found, shards = find_slices(state), state["optimizer"]["shards"]
    wrong = [i for i, shard in enumerate(shards) if f"/optimizer/shards/{i}" not in found or set(shard) != SLICE_KEYS]
    if wrong:
        raise ValueError(f"shard {wrong[0]} holds {sorted(shards[wrong[0]])}, not {sorted(SLICE_KEYS)}")
    return [found[f"/optimizer/shards/{i}"] for i in range(len(shards))]


def _without_own(state: State) -> State:
    """What must be the same on all ranks of every layout, with None for what is not."""
    own = {key: None for key in ("model", PARTS, PER_RANK) if key in state}
    return {**state, **own, "optimizer": {**state["optimizer"], "shards": None}}


def _check_partition(vector: int, slices: list[tuple[FlatSlice, int]]) -> None:
    """ValueError unless the slices of one group's vector are all of it, once."""
    position, total = 0, slices[0][0].total
    for part, rank in sorted(slices, key=lambda each: (each[0].offset, each[0].numel)):
        if part.numel and part.offset != position:
            seen = f"one at {part.offset} on rank {rank}"
            raise ValueError(f"vector {vector}: expected a slice at offset {position}, found {seen}")
        position += part.numel
    if position != total:
        raise ValueError(f"vector {vector}: expected slices of {total} elements, found {position}")
