"""Faults of save_sharded: what is written, when it counts as written, and what it costs the checkpoint before."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from minigpt_dist.verify.faults import base
from minigpt_dist.verify.faults.catalogue import Names, fault

State = dict[str, Any]


def _changed(value: Any, change: Any) -> Any:
    """`value` with `change` applied to every tensor in it."""
    if isinstance(value, Tensor):
        return change(value)
    return {k: _changed(v, change) for k, v in value.items()} if isinstance(value, dict) else value


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
