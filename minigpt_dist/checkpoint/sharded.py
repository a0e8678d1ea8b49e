"""Saving and loading a sharded checkpoint: one file a rank, one manifest, all or nothing.

Two ways to write, the same bytes on disk: `save_sharded`, where one process has every rank's state, and `save_shard`,
where every rank writes its own file at the same time. Ranks talk through a callable that gathers bytes, so this room
knows no process group.

Owns who writes what when. Leaves one file to `shard_file`, what makes a folder trustworthy to `folder`, the commit to
`commit`, other world sizes to `reshard`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from minigpt_dist.checkpoint.agreement import Agreement, Exchange
from minigpt_dist.checkpoint.commit import commit, payload_of, step_name, workspace
from minigpt_dist.checkpoint.errors import mismatch, naming_file, need_count
from minigpt_dist.checkpoint.folder import check_files, open_checkpoint
from minigpt_dist.checkpoint.manifest import Manifest, checked_meta, shard_name, shard_record
from minigpt_dist.checkpoint.shard_file import EncodedShard, encode_shard, read_shard, write_shard
from minigpt_dist.checkpoint.state import State

__all__ = ["load_shard", "load_sharded", "save_shard", "save_sharded"]


def save_sharded(
    per_rank_state: Sequence[Mapping[str, Any]], dest_dir: Path | str, step: int, *, meta: dict[str, Any] | None = None
) -> Manifest:
    """Writes all ranks' states as the checkpoint of `step` in `dest_dir` and makes it the latest.

    Args:
        per_rank_state: rank r's state at index r; nested mappings with str keys, lists, tensors and plain values.
        dest_dir: the folder of all checkpoints; made if missing.
        step: completed updates.
        meta: the caller's own JSON, kept in the manifest.

    Raises:
        ValueError: a wrong argument or a value that cannot be saved, before anything is written.
        CheckpointError: the disk refused; the previous checkpoint is untouched and nothing partial is left.
    """
    root, meta = Path(dest_dir), checked_meta(meta)
    step_name(step)  # a wrong step must be told before anything is written
    if isinstance(per_rank_state, Mapping) or not per_rank_state:
        kind = f"{type(per_rank_state).__name__} of {len(per_rank_state)}"
        raise ValueError(f"per_rank_state should be a sequence of one state a rank, but is a {kind}")
    encoded = [encode_shard(state) for state in per_rank_state]
    N = len(encoded)
    with ExitStack() as stack:
        payload = _open_payload(stack, root, step)
        records = tuple(write_shard(payload / shard_name(r, N), shard) for r, shard in enumerate(encoded))
        manifest = Manifest(step, N, records, meta)
        commit(payload.parent, manifest)
    return manifest


def save_shard(
    state: Mapping[str, Any],
    dest_dir: Path | str,
    step: int,
    *,
    rank: int,
    world_size: int,
    exchange: Exchange,
    meta: dict[str, Any] | None = None,
) -> Manifest:
    """Writes this rank's state; called by all ranks, which write at the same time and return when rank 0 has committed.

    Args:
        state, dest_dir, step, meta: as in `save_sharded`; all ranks see `dest_dir`, and `meta` is rank 0's.
        exchange: gathers bytes, each rank's for each rank; called four times.

    Raises:
        CheckpointError: on all ranks, if anything went wrong on any: it names the first such rank and the cause. The
            previous checkpoint is untouched and nothing partial is left.
    """
    root, ranks = Path(dest_dir), Agreement(rank, world_size, exchange)
    encoded: list[EncodedShard] = []

    def check() -> dict[str, Any]:
        encoded.append(encode_shard(state))
        return {"name": step_name(step), "meta": checked_meta(meta)}

    agreed = ranks.run(f"{root}: checking the states", check)
    if len({each["name"] for each in agreed}) > 1:
        raise mismatch(root, "the same step on all ranks", [each["name"] for each in agreed])
    with ExitStack() as stack:

        def open_workspace() -> str | None:
            return _open_payload(stack, root, step).parent.name if rank == 0 else None

        temporary = root / ranks.run(f"{root}: making a temporary folder", open_workspace)[0]
        file = payload_of(temporary, step) / shard_name(rank, world_size)
        written = ranks.run(f"{root}: writing the shards", lambda: asdict(write_shard(file, encoded[0])))
        records = tuple(shard_record(item, r, world_size) for r, item in enumerate(written))
        manifest = Manifest(step, world_size, records, agreed[0]["meta"])

        def finish() -> None:
            if rank == 0:
                check_files(file.parent, manifest)  # what other ranks wrote may be on a disk that only they see
                commit(temporary, manifest)
                stack.close()

        ranks.run(f"{root}: committing", finish)
    return manifest


def load_sharded(src_dir: Path | str, expected_world_size: int) -> list[State]:
    """All ranks' states of one checkpoint, verified before they are parsed.

    Args:
        src_dir: a folder of checkpoints, whose `latest` decides, or one checkpoint's own folder.
        expected_world_size: the number of ranks that must have written it.

    Raises:
        ValueError: `expected_world_size` is not an int of at least 1.
        CheckpointError: one line naming file, expected and found, for whatever is missing, extra or altered.
    """
    need_count("expected_world_size", expected_world_size)
    with open_checkpoint(src_dir, expected_world_size) as (folder, manifest):
        return [read_shard(folder / record.file, record) for record in manifest.shards]


def load_shard(src_dir: Path | str, rank: int, expected_world_size: int) -> State:
    """One rank's state: its own file is verified in full, of the others that they are there and their sizes.

    Raises:
        ValueError: no such rank or world size.
        CheckpointError: as `load_sharded`.
    """
    need_count("expected_world_size", expected_world_size)
    if type(rank) is not int or not 0 <= rank < expected_world_size:
        raise ValueError(f"rank is {rank!r}, but should be in range({expected_world_size})")
    with open_checkpoint(src_dir, expected_world_size) as (folder, manifest):
        record = manifest.shards[rank]
        return read_shard(folder / record.file, record)


def _open_payload(stack: ExitStack, root: Path, step: int) -> Path:
    """A new workspace, closed with `stack`, and in it the empty folder for the checkpoint of `step`."""
    payload = payload_of(stack.enter_context(workspace(root)), step)
    with naming_file(payload, "to make a folder"):
        os.mkdir(payload)
    return payload
