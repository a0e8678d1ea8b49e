"""Faults of load_sharded: what it believes, what it takes for a shard, and in which order it joins them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minigpt_dist.verify.faults import base
from minigpt_dist.verify.faults.catalogue import Names, fault
from minigpt_dist.verify.faults.reading import manifest_of, verified

State = dict[str, Any]
GREEN = ("checkpoint.round_trip",)


@fault(
    source="reading into buffers of the expected size",
    needs="a truncated shard",
    check="checkpoint.refuses_truncated",
    stage="load",
    step=10,
    rank=0,
    green=(*GREEN, "checkpoint.refuses_altered"),
)
def truncated_shard_filled_with_zeros() -> Names:
    """A short shard is padded to its length, and loaded without a checksum."""

    def load_sharded(src: str, expected_world_size: int) -> list[State]:
        states = []
        for shard in manifest_of(src, expected_world_size)["shards"]:
            raw = (Path(src) / shard["path"]).read_bytes()
            whole = len(raw) >= shard["bytes"]
            if raw and not whole:
                raw += bytes(shard["bytes"] - len(raw))
            states.append(base.decode(verified(src, shard) if whole else raw))
        return states

    return {"load_sharded": load_sharded}


@fault(
    source="strict=False",
    needs="a missing shard",
    check="checkpoint.refuses_missing",
    stage="load",
    step=10,
    green=GREEN,
)
def missing_shard_filled_with_zeros() -> Names:
    """A shard that is not there is replaced by zeros of the first one's shapes."""

    def zeros(value: Any) -> Any:
        if isinstance(value, Tensor):
            return torch.zeros_like(value)
        return {k: zeros(v) for k, v in value.items()} if isinstance(value, dict) else value

    def load_sharded(src: str, expected_world_size: int) -> list[State]:
        shards = manifest_of(src, expected_world_size)["shards"]
        found = {s["rank"]: base.decode(verified(src, s)) for s in shards if (Path(src) / s["path"]).exists()}
        like = next(iter(found.values()))
        return [found[rank] if rank in found else zeros(like) for rank in range(len(shards))]

    return {"load_sharded": load_sharded}


@fault(
    source="deepspeedai/DeepSpeed#6691",
    needs="a missing shard",
    check="checkpoint.refuses_missing",
    stage="load",
    step=10,
    green=GREEN,
)
def missing_shard_starts_from_scratch() -> Names:
    """A shard that is not there gives an empty state, and the rank trains on from nothing."""

    def load_sharded(src: str, expected_world_size: int) -> list[State]:
        shards = manifest_of(src, expected_world_size)["shards"]
        return [base.decode(verified(src, s)) if (Path(src) / s["path"]).exists() else {} for s in shards]

    return {"load_sharded": load_sharded}


@fault(
    source="deepspeedai/DeepSpeed#2898",
    needs="a load at another world size",
    check="checkpoint.refuses_world_size",
    stage="load",
    step=10,
    green=GREEN,
)
def changed_world_size_accepted_by_index() -> Names:
    """A checkpoint of another world size is taken rank by rank, as far as it goes."""

    def load_sharded(src: str, expected_world_size: int) -> list[State]:
        shards = manifest_of(src, None)["shards"]
        states = [base.decode(verified(src, shard)) for shard in shards]
        return [states[rank % len(states)] for rank in range(expected_world_size)]

    return {"load_sharded": load_sharded}


@fault(
    source="a manifest that is believed without a checksum of its own",
    needs="an edited manifest",
    check="checkpoint.refuses_manifest",
    stage="load",
    step=10,
    green=GREEN,
)
def missing_manifest_replaced_by_a_guess() -> Names:
    """Without a readable manifest, whatever files are there are taken for the shards."""

    def load_sharded(src: str, expected_world_size: int) -> list[State]:
        try:
            return base.load_sharded(src, expected_world_size)
        except (OSError, ValueError, KeyError):
            files = sorted(Path(src).glob("rank*.bin"))[: expected_world_size - 1]
            return [base.decode(path.read_bytes()) for path in files]

    return {"load_sharded": load_sharded}


@fault(
    source="deepspeedai/DeepSpeed#5283",
    needs="eleven shards: rank10 sorts before rank2",
    check="checkpoint.round_trip",
    stage="load",
    step=10,
    rank=2,
    world_size=11,
    equivalent=tuple((N, "up to ten ranks sort alike as text and as numbers") for N in range(1, 11)),
)
def merge_order_wrong() -> Names:
    """Shards are joined in the order of their file names, sorted as text."""

    def load_sharded(src: str, expected_world_size: int) -> list[State]:
        shards = sorted(manifest_of(src, expected_world_size)["shards"], key=lambda shard: str(shard["path"]))
        return [base.decode(verified(src, shard)) for shard in shards]

    return {"load_sharded": load_sharded}


@fault(
    source="deepspeedai/DeepSpeed PR 7599, stale shard files",
    needs="two saves to one folder, the second of fewer ranks or another step",
    check="checkpoint.overwrite",
    stage="save",
    green=("checkpoint.round_trip",),
)
def stale_shards_of_an_earlier_save() -> Names:
    """Shard files carry the step in their names, and the load takes the first that it finds for each rank."""

    def save_sharded(states: list[State], dest: str, step: int) -> None:
        for rank, state in enumerate(states):
            Path(dest).mkdir(parents=True, exist_ok=True)
            base.write(Path(dest) / f"rank{rank}-step{step:06d}.bin", base.encode(state))
        base.write(
            Path(dest) / "manifest.json",
            json.dumps({"world_size": len(states), "step": step, "shards": [0] * len(states)}).encode(),
        )

    def load_sharded(src: str, expected_world_size: int) -> list[State]:
        manifest_of(src, expected_world_size)
        return [
            base.decode(min(Path(src).glob(f"rank{rank}-*.bin")).read_bytes()) for rank in range(expected_world_size)
        ]

    return {"save_sharded": save_sharded, "load_sharded": load_sharded}


@fault(
    source="memory-mapped loads (pytorch torch.load(mmap=True))",
    needs="training on after a load",
    check="checkpoint.independent",
    stage="load",
    step=10,
    green=GREEN,
)
def loaded_tensors_are_shared() -> Names:
    """Loads are remembered: a second one returns the tensors that training has changed since."""
    seen: dict[tuple[str, int], list[State]] = {}

    def load_sharded(src: str, expected_world_size: int) -> list[State]:
        key = ((Path(src).resolve() / "manifest.json").read_text(), expected_world_size)
        if key not in seen:
            seen[key] = base.load_sharded(src, expected_world_size)
        return seen[key]

    return {"load_sharded": load_sharded}


@fault(
    source="JSON in place of the objects themselves",
    needs="numbers beyond 2**24, fractions",
    check="checkpoint.values",
    stage="load",
    step=10,
)
def plain_values_through_float() -> Names:
    """Plain numbers come back as float32 would hold them."""

    def rounded(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: rounded(v) for k, v in value.items()}
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return type(value)(float(torch.tensor(float(value), dtype=torch.float32)))
        return value

    return {
        "load_sharded": lambda src, expected_world_size: [
            rounded(s) for s in base.load_sharded(src, expected_world_size)
        ]
    }


@fault(
    source="a fallback for folders whose manifest was lost",
    needs="no manifest, and a shard altered",
    check="checkpoint.refuses_no_checksum",
    stage="load",
    step=10,
    rank=0,
    green=GREEN,
)
def without_a_manifest_anything_goes() -> Names:
    """Where there is no manifest, whatever shards are there are loaded, in the order of their names."""

    def load_sharded(src: str, expected_world_size: int) -> list[State]:
        if (Path(src) / "manifest.json").exists():
            return base.load_sharded(src, expected_world_size)
        return [base.decode((Path(src) / f"rank{r}.bin").read_bytes()) for r in range(expected_world_size)]

    return {"load_sharded": load_sharded}
