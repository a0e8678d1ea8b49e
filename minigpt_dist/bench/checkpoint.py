"""Saving: our sharded checkpoint, hashes included, beside a raw write of the same bytes and torch.distributed.checkpoint.

Owns the state that is saved, in the shape and proportions of a training run's, and the goal.
"""

from __future__ import annotations

import itertools
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minigpt_dist.bench.comparison import Comparison
from minigpt_dist.bench.interleave import Seconds, interleaved, slowest
from minigpt_dist.checkpoint import save_shard
from minigpt_dist.launch import run_world
from minigpt_dist.parallel.collectives import barrier, exchange, world

OURS, RAW, DCP = "ours (save_shard, sha256)", "raw write + fsync", "torch.distributed.checkpoint (no hash)"
GOALS = {RAW: 1.1}
_PIECE = 8 * 2**20


def _tensors(numel: int, rank: int) -> dict[str, Tensor]:
    """A fourth of the bytes is the model, the rest this rank's slice of the optimizer's state."""
    generator = torch.Generator().manual_seed(rank)
    return {name: torch.rand(numel, generator=generator) for name in ("weight", "master", "exp_avg", "exp_avg_sq")}


def _state(tensors: dict[str, Tensor], rank: int, world_size: int) -> dict[str, Any]:
    numel = tensors["weight"].numel()
    place = {"offset": rank * numel, "numel": numel, "total": world_size * numel, "steps": [1]}
    shard = {name: tensor for name, tensor in tensors.items() if name != "weight"}
    return {"model": {"weight": tensors["weight"]}, "optimizer": {"shards": [{**place, **shard}]}}


def write_raw(path: Path, tensors: dict[str, Tensor]) -> None:
    """The least that a durable save does: bytes to a file, pieces of 8 MiB, one fsync."""
    with open(path, "xb", buffering=0) as file:
        for tensor in tensors.values():
            for piece in tensor.view(torch.uint8).split(_PIECE):
                file.write(piece.numpy().data)
        os.fsync(file.fileno())


def checkpoint_body(folder: str, numel: int, rounds: int) -> Seconds:
    """On each rank, all ranks at once: four tensors of `numel` float32 elements, each time into an empty folder."""
    from torch.distributed.checkpoint.state_dict_saver import save  # a third of a second to import, and only here

    N, rank = world()
    tensors, root, steps = _tensors(numel, rank), Path(folder) / "saves", itertools.count()
    state = _state(tensors, rank, N)

    def tidy_up() -> None:
        if rank == 0:
            shutil.rmtree(root, ignore_errors=True)
            root.mkdir()
        barrier()

    actions = {
        OURS: lambda: save_shard(state, root, next(steps), rank=rank, world_size=N, exchange=exchange),
        RAW: lambda: write_raw(root / f"rank{rank}", tensors),
        # one name a rank, or it would take the tensors for replicas and write one of them
        DCP: lambda: save({f"rank{rank}": tensors}, checkpoint_id=str(root)),
    }
    return interleaved(actions, rounds, before=tidy_up)


def compare_checkpoints(folder: Path, megabytes: int, world_size: int, rounds: int, deadline_s: float) -> Comparison:
    """Saves of `megabytes` (10^6 bytes, all ranks together) below `folder`, in turns."""
    numel = megabytes * 10**6 // (4 * 4 * world_size)
    ranks = run_world(checkpoint_body, world_size, str(folder), numel, rounds, deadline_s=deadline_s)
    title = f"Checkpoint of {megabytes} MB, {world_size} ranks, {rounds} rounds"
    return Comparison(title, slowest(ranks), OURS, GOALS)
