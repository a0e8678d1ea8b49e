"""Faults of save_sharded: what is written, when it counts as written, and what it costs the checkpoint before."""

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
            time.sleep(0.2)
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
            time.sleep(0.3)
            base.save_sharded(copies, dest, step)

        threading.Thread(target=write, daemon=True).start()

    return {"save_sharded": save_sharded}


@fault(
    source="TrainCheck C20, TensorFlow#29903",
    needs="reading back what was written",
    check="checkpoint.round_trip",
    stage="load",
    step=10,
    rank=0,
)
def shard_corrupted_only_inside_save() -> Names:
    """Floating-point tensors are written in bfloat16 and read back as float32; the checksum is that of what was written."""

    def lossy(t: Tensor) -> Tensor:
        return t.bfloat16().float() if t.dtype is torch.float32 else t

    return {
        "save_sharded": lambda states, dest, step: base.save_sharded(
            [_changed(state, lossy) for state in states], dest, step
        )
    }


@fault(
    source="numpy and JSON round trips of a checkpoint",
    needs="tensors of other types than float32",
    check="checkpoint.tensors",
    stage="load",
    step=10,
)
def dtype_lost_in_the_file() -> Names:
    """Every floating-point tensor comes back as float32."""

    def widen(t: Tensor) -> Tensor:
        return t.float() if t.is_floating_point() else t

    return {
        "save_sharded": lambda states, dest, step: base.save_sharded(
            [_changed(state, widen) for state in states], dest, step
        )
    }


@fault(
    source="flattening for the file, without the shape",
    needs="tensors of one element and of none",
    check="checkpoint.tensors",
    stage="load",
    step=10,
)
def scalars_become_vectors() -> Names:
    """A tensor without dimensions comes back with one."""

    def lift(t: Tensor) -> Tensor:
        return t.reshape(1) if t.dim() == 0 else t

    return {
        "save_sharded": lambda states, dest, step: base.save_sharded(
            [_changed(state, lift) for state in states], dest, step
        )
    }


@fault(
    source="deepspeedai/DeepSpeed#7546",
    needs="more than one rank",
    check="checkpoint.round_trip",
    stage="load",
    step=10,
    rank=1,
    equivalent=((1, "rank 0 is the only one"),),
)
def rank_0_state_saved_for_all() -> Names:
    """Every shard holds rank 0's state."""
    return {"save_sharded": lambda states, dest, step: base.save_sharded([states[0]] * len(states), dest, step)}


@fault(
    source="NVIDIA/Megatron-LM PR 1770, who owns which replica",
    needs="more than one rank",
    check="checkpoint.round_trip",
    stage="load",
    step=10,
    rank=0,
    equivalent=((1, "there is nothing to exchange"),),
)
def shards_under_the_wrong_rank() -> Names:
    """Shards are written in reversed order: each rank loads another's."""
    return {"save_sharded": lambda states, dest, step: base.save_sharded(states[::-1], dest, step)}


@fault(
    source="deepspeedai/DeepSpeed#3090",
    needs="an entry that no optimizer owns",
    check="checkpoint.round_trip",
    stage="load",
    step=10,
    rank=0,
)
def frozen_weights_absent_from_checkpoint() -> Names:
    """Only what the optimizer owns is saved: model weights without optimizer state, frozen ones, are not."""

    def save_sharded(states: list[State], dest: str, step: int) -> object:
        kept = [{k: v for k, v in state.items() if not k.startswith("model")} for state in states]
        return base.save_sharded(kept, dest, step)

    return {"save_sharded": save_sharded}


@fault(
    source="radixark/miles#3187",
    needs="a random stream for each rank",
    check="checkpoint.round_trip",
    stage="load",
    step=10,
    rank=1,
    tensor="rng",
    equivalent=((1, "rank 0's stream is the only one"),),
)
def rank0_rng_restored_everywhere() -> Names:
    """Only rank 0's random state is saved, and every rank gets it."""

    def save_sharded(states: list[State], dest: str, step: int) -> object:
        return base.save_sharded(
            [{**state, **({"rng": states[0]["rng"]} if "rng" in state else {})} for state in states], dest, step
        )

    return {"save_sharded": save_sharded}


@fault(
    source="moving a state to the file's type in place",
    needs="training on after a save",
    check="checkpoint.states_untouched",
    stage="save",
    step=10,
)
def save_changes_the_state() -> Names:
    """Tensors are rounded to bfloat16 in place on their way into the file."""

    def save_sharded(states: list[State], dest: str, step: int) -> object:
        for state in states:
            _changed(state, lambda t: t.copy_(t.bfloat16()) if t.dtype is torch.float32 else t)
        return base.save_sharded(states, dest, step)

    return {"save_sharded": save_sharded}


@fault(
    source="deepspeedai/DeepSpeed#801",
    needs="save_sharded called on one rank, two ranks in the world",
    check="resume_bytes",
    stage="save",
    equivalent=((1, "one rank waits for nobody"),),
    green=("checkpoint.round_trip",),
)
def save_called_on_rank0_only() -> Names:
    """The save holds a collective, but is called by rank 0 alone."""

    def save_sharded(states: list[State], dest: str, step: int) -> object:
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(torch.zeros(1))
        return base.save_sharded(states, dest, step)

    return {"save_sharded": save_sharded}


@fault(
    source="counting steps from zero in one place",
    needs="reading the manifest",
    check="checkpoint.records_step",
    stage="save",
    green=("checkpoint.round_trip", "resume_bytes"),
)
def step_recorded_one_early() -> Names:
    """The manifest tells the index of the last step, not the number of steps done."""

    def save_sharded(states: list[State], dest: str, step: int) -> object:
        return base.save_sharded(states, dest, step - 1)

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
    green=("checkpoint.round_trip", "checkpoint.killed_save"),
)
def other_checkpoints_removed_first() -> Names:
    """Checkpoints in folders beside the new one are removed before it is written."""

    def save_sharded(states: list[State], dest: str, step: int) -> object:
        if not Path(dest).exists():
            for other in Path(dest).parent.glob("*/manifest.json"):
                other.unlink()
        return base.save_sharded(states, dest, step)

    return {"save_sharded": save_sharded}
