"""Loading a checkpoint of any layout at any other: whole tensors from the saved parts, cut anew for one rank, bytes unchanged.

Owns what of a state moves, what is one for all ranks and what belongs to a rank alone. Leaves putting the whole together to `whole`,
layouts that differ along the data axis alone and say no more to `reshard`, reading and verifying to `folder`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import Tensor

from minigpt_dist.checkpoint.errors import mismatch
from minigpt_dist.checkpoint.flat_slice import SLICED_NAMES, find_slices, rank_slice
from minigpt_dist.checkpoint.folder import open_checkpoint
from minigpt_dist.checkpoint.manifest import Manifest
from minigpt_dist.checkpoint.reshard import COUNTS, load_resharded
from minigpt_dist.checkpoint.shard_file import read_shard
from minigpt_dist.checkpoint.state import State
from minigpt_dist.checkpoint.whole import PARTS, Whole, pieces
from minigpt_dist.parts import Part, Parts

__all__ = ["load_at_layout", "load_whole", "merged", "relaid"]


def load_at_layout(src_dir: Path | str, parts: Parts, rank: int, world_size: int) -> State:
    """The state of a checkpoint for a rank that is to hold `parts`, whatever the layout that wrote it.

    `parts.data_rank` gets its even slice of each flat vector, as from `load_resharded`. Of the layout that wrote it, a rank gets its own
    state, from its own file alone: of the others only sizes are checked. At another one, every file is read and verified, one at a
    time, and `state["rng"]` is None. Rows that pad a vocabulary are dropped and made anew, as zeros. At most one whole
    state of what this rank's stage holds is in memory, beside one file.

    Args:
        rank, world_size: of the ranks that load.

    A checkpoint whose states say nothing of parts goes on where it was, or in a data-parallel layout if it was one.

    Raises:
        CheckpointError: as `load_sharded`; parts that are missing, there twice, of other shapes or, where several ranks hold the
            same, of other bytes; a tensor that the model has and the checkpoint lacks, or the reverse.
    """
    with open_checkpoint(src_dir) as (folder, manifest):
        own = _own(folder, manifest, parts, rank) if manifest.world_size == world_size else None
        if own is not None:
            return own
        states = _Shards(folder, manifest)
        if states.say_parts:
            with _naming(folder):
                return relaid(states, parts, world_size)
    if world_size != parts.data_ranks:
        wanted = f"states that say which parts they hold, to go on in another layout than that of its {manifest.world_size} ranks"
        raise mismatch(folder, wanted, "states that do not")
    return load_resharded(src_dir, world_size)[parts.data_rank]


def load_whole(src_dir: Path | str) -> State:
    """The state of a checkpoint of any layout as that of a single rank, which holds all; `rng` is None unless one rank wrote it.

    Raises:
        CheckpointError: as `load_at_layout`.
    """
    with open_checkpoint(src_dir) as (folder, manifest):
        states = _Shards(folder, manifest)
        if states.say_parts and manifest.world_size > 1:
            with _naming(folder):
                return merged(states)
    return load_resharded(src_dir, 1)[0]


def relaid(states: Iterable[State], parts: Parts, world_size: int) -> State:
    """From all ranks' states of one layout, one after the other, that of a rank which holds `parts` in a layout of `world_size` ranks.

    ValueError as in `Whole`, and for names that only one of the two sides has.
    """
    wanted = {parts.origin(name): part.shape for name, part in parts.tensors.items()}
    whole = _joined(states, wanted)
    stages = world_size // (parts.data_ranks * max((part.of for part in parts.tensors.values()), default=1))
    extra = sorted({each.origin(name) for each in whole.parts for name in each.tensors} - set(wanted))
    if stages == 1 and extra:  # a stage knows of its own layers only
        raise ValueError(f"the checkpoint holds {extra[0]}, which the model has not")
    return _cut(whole, parts)


def merged(states: Iterable[State]) -> State:
    """All ranks' states of one layout as that of a single rank, its vectors in the order of ranks. ValueError as in `Whole`."""
    whole = _joined(states, None)
    tensors: dict[str, Part] = {}
    vectors = [dict[str, None]() for _ in range(max(len(each.vectors) for each in whole.parts))]
    for each in whole.parts:
        for name, part in each.tensors.items():
            tensors.setdefault(name, replace(part, cut=None, index=0, of=1))
        for vector, names in zip(vectors, each.vectors, strict=False):  # a stage may have fewer
            vector.update(dict.fromkeys(map(each.origin, names)))
    return _cut(whole, Parts(tensors, tuple(tuple(vector) for vector in vectors)))


def _joined(states: Iterable[State], wanted: Mapping[str, tuple[int, ...]] | None) -> Whole:
    whole = Whole(wanted)
    for state in states:
        whole.add(state)
        del state  # before the next one is read
    whole.check()
    return whole


def _cut(whole: Whole, parts: Parts) -> State:
    """The state of a rank that holds `parts`, in memory of its own."""

    def held(kind: str, name: str) -> Tensor:
        found = whole.tensors.get(kind, {}).get(parts.origin(name))
        if found is None:
            raise ValueError(f"expected {kind} {parts.origin(name)} on some rank, found none")
        return parts.tensors[name].held(found)

    shards = []
    for names in parts.vectors:
        mine = rank_slice(parts.data_rank, parts.data_ranks, sum(parts.tensors[name].numel for name in names))
        own = list(pieces(parts, names, mine))
        vectors = {
            kind: torch.cat(
                [held(kind, names[0]).new_empty(0)]
                + [held(kind, name).reshape(-1)[first : first + stop - start] for name, first, start, stop in own]
            )
            for kind in SLICED_NAMES
        }
        known = {name for name, *_ in own}
        counts = [whole.counts[parts.origin(name)] if name in known else 0 for name in names]
        shards.append({**asdict(mine), **vectors, COUNTS: counts})
    return {
        **whole.rest,
        "model": {name: held("model", name).clone() for name in parts.tensors},
        "optimizer": {**whole.rest["optimizer"], "shards": shards},
        PARTS: parts.to_plain(),
    }


class _Shards(Iterator[State]):
    """All ranks' states in order, each read when it is asked for; the first one at once, to see whether states say their parts."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._coming = (read_shard(folder / record.file, record) for record in manifest.shards)
        self._first: State | None = next(self._coming)
        self.say_parts = PARTS in self._first

    def __next__(self) -> State:
        first, self._first = self._first, None
        return next(self._coming) if first is None else first


def _own(folder: Path, manifest: Manifest, parts: Parts, rank: int) -> State | None:
    """What `rank` has saved, if that is just what a rank that holds `parts` would save."""
    own = read_shard(folder / manifest.shards[rank].file, manifest.shards[rank])
    totals = [sum(parts.tensors[name].numel for name in names) for names in parts.vectors]
    slices = [rank_slice(parts.data_rank, parts.data_ranks, total) for total in totals]
    shapes = {name: part.held_shape for name, part in parts.tensors.items()}
    model = own.get("model")
    same = (
        isinstance(model, dict)
        and own.get(PARTS, parts.to_plain()) == parts.to_plain()
        and {name: tensor.shape for name, tensor in model.items()} == shapes
        and list(find_slices(own).values()) == slices
    )
    return own if same else None


@contextmanager
def _naming(folder: Path) -> Iterator[None]:
    """Turns what states that do not fit together raise inside the block into a CheckpointError that names the folder."""
    try:
        yield
    except ValueError as error:
        raise mismatch(folder, "states that can be cut anew", error) from error
    except (KeyError, TypeError, AttributeError) as error:
        raise mismatch(folder, "states that can be cut anew", f"{type(error).__name__}: {error}") from error
