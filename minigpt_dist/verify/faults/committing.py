"""Faults of committing a checkpoint: when it counts as written, where, by whom, and what it costs the one before."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from minigpt_dist.verify.faults import base
from minigpt_dist.verify.faults.catalogue import Names, fault

State = dict[str, Any]


def _changed(value: Any, change: Any) -> Any:
    """`value` with `change` applied to every tensor in it."""
    if isinstance(value, Tensor):
        return change(value)
    return {k: _changed(v, change) for k, v in value.items()} if isinstance(value, dict) else value


def _straight(states: list[State], dest: Path, step: int) -> None:
    """Shards and manifest under their final names, one after the other."""
    dest.mkdir(parents=True, exist_ok=True)
    shards = []
    for rank, state in enumerate(states):
        raw = base.encode(state)
        base.write(dest / f"rank{rank}.bin", raw)
        shards.append(
            {"rank": rank, "path": f"rank{rank}.bin", "sha256": hashlib.sha256(raw).hexdigest(), "bytes": len(raw)}
        )
    manifest = {"schema_version": 1, "world_size": len(states), "step": step, "shards": shards}
    base.write(dest / "manifest.json", json.dumps(manifest).encode())


@fault(
    source="Lightning-AI/pytorch-lightning#688",
    needs="a kill during the save, an older checkpoint in the same folder",
    check="checkpoint.killed_save",
    stage="save",
    step=20,
    green=("checkpoint.round_trip", "checkpoint.killed_first_save"),
)
def overwrite_in_place() -> Names:
    """Shards are written straight to their final names: a kill during the write costs the checkpoint before."""
    return {"save_sharded": lambda states, dest, step: _straight(states, Path(dest), step)}


@fault(
    source="deepspeedai/DeepSpeed#6714 and others: clearing the folder first",
    needs="a kill during the save",
    check="checkpoint.killed_save",
    stage="save",
    step=20,
    green=("checkpoint.round_trip",),
)
def old_checkpoint_removed_first() -> Names:
    """The old manifest is removed before the new shards are written."""

    def save_sharded(states: list[State], dest: str, step: int) -> object:
        (Path(dest) / "manifest.json").unlink(missing_ok=True)
        return base.save_sharded(states, dest, step)

    return {"save_sharded": save_sharded}


@fault(
    source="MrNeRF/LichtFeld-Studio#717",
    needs="a full disk",
    check="checkpoint.disk_full",
    stage="save",
    green=("checkpoint.round_trip",),
)
def disk_full_swallowed() -> Names:
    """An OSError during the save is caught and passed over; training goes on as though it had been saved."""

    def save_sharded(states: list[State], dest: str, step: int) -> None:
        with contextlib.suppress(OSError):
            base.save_sharded(states, dest, step)

    return {"save_sharded": save_sharded}


@fault(
    source="pytorch/pytorch#144657",
    needs="training on after a save",
    check="checkpoint.independent",
    stage="load",
    step=10,
)
def live_tensor_captured_by_async_save() -> Names:
    """The save hands the tensors, not copies, to a thread; an update made meanwhile is what is written."""

    def save_sharded(states: list[State], dest: str, step: int) -> None:
        def write() -> None:
            time.sleep(0.2)  # the mistake itself: longer than the update that follows the save
            base.save_sharded(states, dest, step)

        threading.Thread(target=write).start()

    return {"save_sharded": save_sharded}


@fault(
    source="KempnerInstitute/KempnerForge#49",
    needs="a load right after the save",
    check="checkpoint.round_trip",
    stage="load",
    step=10,
)
def save_returns_before_it_is_committed() -> Names:
    """The save returns while a thread still writes the manifest: who loads at once finds an older checkpoint or none."""

    def save_sharded(states: list[State], dest: str, step: int) -> None:
        copies = [_changed(state, lambda t: t.clone()) for state in states]

        def write() -> None:
            time.sleep(0.3)  # the mistake itself: longer than the load that follows the save
            base.save_sharded(copies, dest, step)

        threading.Thread(target=write, daemon=True).start()

    return {"save_sharded": save_sharded}


@fault(
    source="deepspeedai/DeepSpeed#801",
    needs="save_sharded called on one rank, two ranks in the world",
    check="resume_bytes",
    stage="save",
    equivalent=((1, "one rank waits for nobody"),),
    green=("checkpoint.round_trip",),
    hangs=True,
)
def save_called_on_rank0_only() -> Names:
    """The save holds a collective, but is called by rank 0 alone."""

    def save_sharded(states: list[State], dest: str, step: int) -> object:
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(torch.zeros(1))
        return base.save_sharded(states, dest, step)

    return {"save_sharded": save_sharded}


@fault(
    source="relative paths in a manifest",
    needs="a load from another working directory",
    check="checkpoint.paths",
    stage="load",
    green=("checkpoint.round_trip",),
)
def manifest_depends_on_the_working_directory() -> Names:
    """The manifest holds shard paths relative to the working directory of the save."""

    def save_sharded(states: list[State], dest: str, step: int) -> None:
        base.save_sharded(states, dest, step)
        manifest = json.loads((Path(dest) / "manifest.json").read_text())
        for shard in manifest["shards"]:
            shard["path"] = f"{dest}/{shard['path']}"
        base.write(Path(dest) / "manifest.json", json.dumps(manifest).encode())

    def load_sharded(src: str, expected_world_size: int) -> list[State]:
        if json.loads((Path(src) / "manifest.json").read_text())["world_size"] != expected_world_size:
            raise RuntimeError("world size")
        shards = json.loads((Path(src) / "manifest.json").read_text())["shards"]
        raws = [(Path(shard["path"]).read_bytes(), shard["sha256"]) for shard in shards]
        if any(hashlib.sha256(raw).hexdigest() != wanted for raw, wanted in raws):
            raise RuntimeError("damaged")
        return [base.decode(raw) for raw, _ in raws]

    return {"save_sharded": save_sharded, "load_sharded": load_sharded}


@fault(
    source="one torch.save of everything (the opposite of sharding)",
    needs="three ranks",
    check="checkpoint.one_file_a_rank",
    stage="save",
    step=10,
    world_size=3,
    green=("checkpoint.round_trip", "resume_bytes"),
    equivalent=((1, "one rank has one file"),),
)
def all_states_in_one_file() -> Names:
    """Rank 0's file holds the states of all ranks."""

    def save_sharded(states: list[State], dest: str, step: int) -> object:
        whole = {str(rank): state for rank, state in enumerate(states)}
        return base.save_sharded([whole, *({"empty": 0} for _ in states[1:])], dest, step)

    def load_sharded(src: str, expected_world_size: int) -> list[State]:
        whole = base.load_sharded(src, expected_world_size)[0]
        return [whole[str(rank)] for rank in range(expected_world_size)]

    return {"save_sharded": save_sharded, "load_sharded": load_sharded}


@fault(
    source="a cache of the last save",
    needs="two checkpoints",
    check="checkpoint.side_by_side",
    stage="save",
    green=("checkpoint.round_trip",),
)
def checkpoints_share_their_shards() -> Names:
    """Shards go to one folder beside all checkpoints: a later save overwrites those of an earlier one."""

    def save_sharded(states: list[State], dest: str, step: int) -> object:
        Path(dest).mkdir(parents=True, exist_ok=True)
        return base.save_sharded(states, str(Path(dest).parent), step)

    return {
        "save_sharded": save_sharded,
        "load_sharded": lambda src, expected_world_size: base.load_sharded(str(Path(src).parent), expected_world_size),
    }


@fault(
    source="keep-the-last-one retention that removes before it writes",
    needs="a kill during the save, an older checkpoint in another folder",
    check="checkpoint.killed_first_save",
    stage="save",
    step=10,
    green=("checkpoint.round_trip",),
)
def other_checkpoints_removed_first() -> Names:
    """Checkpoints in folders beside the new one are removed before it is written."""

    def save_sharded(states: list[State], dest: str, step: int) -> object:
        if not Path(dest).exists():
            for other in Path(dest).parent.glob("*/manifest.json"):
                other.unlink()
        return base.save_sharded(states, dest, step)

    return {"save_sharded": save_sharded}
