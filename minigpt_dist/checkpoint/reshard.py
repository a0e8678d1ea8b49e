"""Loading a checkpoint of N ranks for M ranks: flat slices are joined by offset and cut anew, bytes unchanged.

Owns what of a state is cut, what is one for all ranks and what belongs to a rank alone. Leaves the rule of the cut to
`flat_slice`, reading and verifying to `folder`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minigpt_dist.checkpoint.errors import mismatch, need_count
from minigpt_dist.checkpoint.flat_slice import SLICED_NAMES, FlatSlice, find_slices, rank_slice
from minigpt_dist.checkpoint.folder import open_checkpoint
from minigpt_dist.checkpoint.shard_file import as_bytes, read_shard
from minigpt_dist.checkpoint.state import State, child_pointer, flatten

__all__ = ["COUNTS", "PER_RANK", "check_same", "load_resharded", "merge_states", "split_state"]

PER_RANK = "rng"  # a rank's own; it has no meaning at another world size
COUNTS = "steps"  # updates of each parameter, known to the ranks that own a piece of it, and 0 elsewhere


def load_resharded(src_dir: Path | str, world_size: int) -> list[State]:
    """The states of a checkpoint for `world_size` ranks, however many wrote it.

    Of each flat slice under `state["optimizer"]`, rank r gets elements [r*chunk, (r+1)*chunk) with
    chunk = ceil(total / world_size), without padding; the last ranks may get fewer or none. Of a slice's `steps`, one
    count a parameter, 0 means that a rank does not know it. Everything else must be the same on all ranks that wrote,
    and all get it; `state["rng"]` is each rank's own, and None at another world size.

    Raises:
        ValueError: `world_size` is not an int of at least 1.
        CheckpointError: as `load_sharded`, or slices with a hole or an overlap, or ranks that disagree.
    """
    need_count("world_size", world_size)
    with open_checkpoint(src_dir) as (folder, manifest):
        states = [read_shard(folder / record.file, record) for record in manifest.shards]
    if world_size == manifest.world_size and _is_cut_by_rule(states):
        return states
    try:
        cut = split_state(merge_states(states), world_size)
    except ValueError as error:
        raise mismatch(folder, "states that can be cut anew", error) from error
    if world_size == manifest.world_size:
        for state, own in zip(cut, states, strict=True):
            state.update({PER_RANK: own[PER_RANK]} if PER_RANK in own else {})
    return cut


def merge_states(states: Sequence[State]) -> State:
    """The states of all ranks as the state of a single one, whose slices hold whole vectors; `rng` is None.

    Raises:
        ValueError: slices with a hole or an overlap, or anything else that differs between ranks.
    """
    slices = [find_slices(state) for state in states]
    for rank, found in enumerate(slices):
        if found.keys() != slices[0].keys():
            raise ValueError(f"rank {rank} has slices at {sorted(found)}, rank 0 at {sorted(slices[0])}")
    shared = [_map_slices(_without_own(state), "", slices[0], _shared_part) for state in states]
    for rank, other in enumerate(shared):
        check_same(shared[0], other, rank)

    def join(part: Mapping[str, Any], place: str) -> dict[str, Any]:
        return {**part, **_join([_at(state, place) for state in states], place)}

    whole: State = _map_slices(_without_own(states[0]), "", slices[0], join)
    return whole


def split_state(whole: State, world_size: int) -> list[State]:
    """The states of `world_size` ranks from that of a single one, as `load_resharded` describes it."""
    places = find_slices(whole)

    def cut(rank: int) -> Callable[[Mapping[str, Any], str], dict[str, Any]]:
        return lambda part, place: _cut(part, rank_slice(rank, world_size, places[place].total))

    return [_map_slices(_without_own(whole), "", places, cut(rank)) for rank in range(world_size)]


def _is_cut_by_rule(states: Sequence[State]) -> bool:
    return all(
        part == rank_slice(rank, len(states), part.total)
        for rank, state in enumerate(states)
        for part in find_slices(state).values()
    )


def _without_own(state: State) -> State:
    return {key: None if key == PER_RANK else value for key, value in state.items()}


def _map_slices(node: Any, place: str, slices: Mapping[str, Any], change: Callable[[Any, str], Any]) -> Any:
    """`node` with `change(slice, place)` in each slice's place; containers are new, all other leaves the same."""
    if place in slices:
        return change(node, place)
    if isinstance(node, Mapping):
        return {key: _map_slices(value, child_pointer(place, key), slices, change) for key, value in node.items()}
    if isinstance(node, (list, tuple)):
        return [_map_slices(value, child_pointer(place, str(i)), slices, change) for i, value in enumerate(node)]
    return node


def _at(state: State, place: str) -> dict[str, Any]:
    """The slice of `state` that lies at `place`."""
    found: list[dict[str, Any]] = []
    _map_slices(state, "", {place: None}, lambda part, _: found.append(part))
    return found[0]


def _shared_part(part: Mapping[str, Any], place: str) -> dict[str, Any]:
    """What of a slice all ranks have alike."""
    return {key: value for key, value in part.items() if key not in (*SLICED_NAMES, "offset", "numel", COUNTS)}


def _join(parts: Sequence[dict[str, Any]], place: str) -> dict[str, Any]:
    """The whole vectors of one slice from all ranks' parts, ordered by where they start."""
    parts = sorted(parts, key=lambda part: (part["offset"], part["numel"]))
    position, total = 0, parts[0]["total"]
    for part in parts:
        if part["offset"] != position and part["numel"]:
            raise ValueError(f"{place}: expected a slice at offset {position}, found one at {part['offset']}")
        position += part["numel"]
    if position != total:
        raise ValueError(f"{place}: expected slices of {total} elements, found {position}")
    whole: dict[str, Any] = {"offset": 0, "numel": total}
    if any(COUNTS in part for part in parts):
        whole[COUNTS] = _join_counts([part.get(COUNTS) for part in parts], place)
    for name in (name for name in SLICED_NAMES if any(name in part for part in parts)):
        tensors = [part.get(name) for part in parts]
        if len({t.dtype if isinstance(t, Tensor) else None for t in tensors}) > 1 or tensors[0] is None:
            raise ValueError(f"{place}/{name}: expected tensors of one dtype on all ranks")
        whole[name] = torch.cat([part[name][: part["numel"]] for part in parts])
    return whole


def _join_counts(counts: Sequence[Any], place: str) -> list[int]:
    """Each parameter's count, from whichever ranks know it."""
    if any(not isinstance(mine, list) or len(mine) != len(counts[0]) for mine in counts):
        raise ValueError(f"{place}/{COUNTS}: expected lists of one length on all ranks")
    known = [set(each) - {0} for each in zip(*counts, strict=True)]
    for i, values in enumerate(known):
        if len(values) > 1:
            raise ValueError(f"{place}/{COUNTS}/{i}: expected one count on all ranks, found {sorted(values)}")
    return [values.pop() if values else 0 for values in known]


def _cut(part: Mapping[str, Any], mine: FlatSlice) -> dict[str, Any]:
    tensors = {
        name: part[name][mine.offset : mine.offset + mine.numel].clone() for name in SLICED_NAMES if name in part
    }
    return {**part, **tensors, "offset": mine.offset, "numel": mine.numel}


def check_same(first: State, other: State, rank: int) -> None:
    """ValueError naming the first place where two ranks' shared parts differ in a bit."""
    a, b = flatten(first), flatten(other)
    if a.plain != b.plain or a.tensors.keys() != b.tensors.keys():
        raise ValueError(f"expected the same values on all ranks, but those of rank {rank} are not rank 0's")
    for place, tensor in a.tensors.items():
        same = tensor.dtype == b.tensors[place].dtype and tensor.shape == b.tensors[place].shape
        if not same or not torch.equal(as_bytes(tensor), as_bytes(b.tensors[place])):
            raise ValueError(f"expected the same {place} on all ranks, but that of rank {rank} is not rank 0's")
