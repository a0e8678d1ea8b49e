"""Faults of verification: bytes that are believed without a checksum, or before it."""

from __future__ import annotations

import hashlib
import json
import pickle
from pathlib import Path
from typing import Any

import torch

from minigpt_dist.verify.faults import base
from minigpt_dist.verify.faults.catalogue import Names, fault
from minigpt_dist.verify.faults.reading import manifest_of, verified

State = dict[str, Any]
GREEN = ("checkpoint.round_trip",)


@fault(
    source="checksums written and never compared",
    needs="an altered shard",
    check="checkpoint.refuses_altered",
    stage="load",
    step=10,
    rank=0,
    green=GREEN,
)
def checksum_never_compared() -> Names:
    """Shards are read without looking at their checksums."""

    def load_sharded(src: str, expected_world_size: int) -> list[State]:
        shards = manifest_of(src, expected_world_size)["shards"]
        return [base.decode((Path(src) / shard["path"]).read_bytes()) for shard in shards]

    return {"load_sharded": load_sharded}


@fault(
    source="verification of the first shard as a sample",
    needs="an altered shard of another rank",
    check="checkpoint.refuses_altered",
    stage="load",
    step=10,
    rank=1,
    green=GREEN,
    equivalent=((1, "the first shard is the only one"),),
)
def only_the_first_shard_is_verified() -> Names:
    """Only rank 0's checksum is compared."""

    def load_sharded(src: str, expected_world_size: int) -> list[State]:
        shards = manifest_of(src, expected_world_size)["shards"]
        verified(src, shards[0])
        return [base.decode((Path(src) / shard["path"]).read_bytes()) for shard in shards]

    return {"load_sharded": load_sharded}


@fault(
    source="hashing a file's name or size",
    needs="an altered shard",
    check="checkpoint.refuses_altered",
    stage="load",
    step=10,
    rank=0,
    green=GREEN,
)
def checksum_of_the_size() -> Names:
    """What is compared is the length: a flipped bit goes unnoticed."""

    def load_sharded(src: str, expected_world_size: int) -> list[State]:
        raws = []
        for shard in manifest_of(src, expected_world_size)["shards"]:
            raw = (Path(src) / shard["path"]).read_bytes()
            if len(raw) != shard["bytes"]:
                raise RuntimeError("length")
            raws.append(raw)
        return [base.decode(raw) for raw in raws]

    return {"load_sharded": load_sharded}


@fault(
    source="LMResiliency/lm-resiliency#78",
    needs="a manifest without a checksum",
    check="checkpoint.refuses_no_checksum",
    stage="load",
    step=10,
    rank=0,
    green=(*GREEN, "checkpoint.refuses_altered"),
)
def missing_checksum_accepted() -> Names:
    """A checksum that is empty or absent is not compared."""

    def load_sharded(src: str, expected_world_size: int) -> list[State]:
        raws = []
        for shard in manifest_of(src, expected_world_size)["shards"]:
            raw = (Path(src) / shard["path"]).read_bytes()
            if shard.get("sha256") and hashlib.sha256(raw).hexdigest() != shard["sha256"]:
                raise RuntimeError("damaged")
            raws.append(raw)
        return [base.decode(raw) for raw in raws]

    return {"load_sharded": load_sharded}


@fault(
    source="paths in a manifest joined without a look",
    needs="an edited manifest",
    check="checkpoint.refuses_manifest",
    stage="load",
    step=10,
    green=(*GREEN, "checkpoint.refuses_altered"),
)
def altered_manifest_accepted() -> Names:
    """Sizes and checksums are those the shard file itself tells, so that a manifest naming shards of another folder is followed."""

    def save_sharded(states: list[State], dest: str, step: int) -> None:
        base.save_sharded(states, dest, step)
        for shard in manifest_of(dest, None)["shards"]:
            base.write(Path(dest) / f"{shard['path']}.sha256", str(shard["sha256"]).encode())

    def load_sharded(src: str, expected_world_size: int) -> list[State]:
        states = []
        for shard in manifest_of(src, expected_world_size)["shards"]:
            path = Path(src) / shard["path"]
            raw = path.read_bytes()
            if hashlib.sha256(raw).hexdigest() != Path(f"{path}.sha256").read_text():
                raise RuntimeError("damaged")
            states.append(base.decode(raw))
        return states

    return {"save_sharded": save_sharded, "load_sharded": load_sharded}


@fault(
    source="a shard for a shard of another step",
    needs="shards of two checkpoints mixed",
    check="checkpoint.refuses_exchanged",
    stage="load",
    step=10,
    green=(*GREEN, "checkpoint.refuses_altered"),
)
def shard_carries_its_own_checksum() -> Names:
    """Each shard ends in its own checksum: a whole shard of another rank or step is accepted."""

    def save_sharded(states: list[State], dest: str, step: int) -> None:
        base.save_sharded(states, dest, step)
        for shard in manifest_of(dest, None)["shards"]:
            path = Path(dest) / shard["path"]
            raw = path.read_bytes()
            base.write(path, raw + hashlib.sha256(raw).digest())

    def load_sharded(src: str, expected_world_size: int) -> list[State]:
        states = []
        for shard in manifest_of(src, expected_world_size)["shards"]:
            raw = (Path(src) / shard["path"]).read_bytes()
            if hashlib.sha256(raw[:-32]).digest() != raw[-32:]:
                raise RuntimeError("damaged")
            states.append(base.decode(raw[:-32]))
        return states

    return {"save_sharded": save_sharded, "load_sharded": load_sharded}


def _pickled(states: list[State], dest: str, step: int) -> None:
    base.save_sharded(states, dest, step)
    base.write(Path(dest) / "extra.pkl", pickle.dumps({"step": step}))


@fault(
    source="huggingface/transformers#43140",
    needs="a malicious side file",
    check="checkpoint.runs_no_pickle",
    stage="load",
    step=10,
    green=GREEN,
)
def unsafe_pickle_in_side_file() -> Names:
    """A side file of the checkpoint is unpickled without restriction although the shards are read safely."""

    def load_sharded(src: str, expected_world_size: int) -> list[State]:
        with (Path(src) / "extra.pkl").open("rb") as file:
            pickle.load(file)
        return base.load_sharded(src, expected_world_size)

    return {"save_sharded": _pickled, "load_sharded": load_sharded}


@fault(
    source="torch.load before the checksum (PyTorch security notes)",
    needs="a planted pickle",
    check="checkpoint.refuses_before_loading",
    stage="load",
    step=10,
    green=GREEN,
)
def unpickled_before_it_is_verified() -> Names:
    """Shards are torch archives, loaded with weights_only=False before their checksum is compared."""

    def save_sharded(states: list[State], dest: str, step: int) -> None:
        base.save_sharded(states, dest, step)
        manifest = manifest_of(dest, None)
        for shard, state in zip(manifest["shards"], states, strict=True):
            torch.save(state, path := Path(dest) / shard["path"])
            shard["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
        base.write(Path(dest) / "manifest.json", json.dumps(manifest).encode())

    def load_sharded(src: str, expected_world_size: int) -> list[State]:
        states = []
        for shard in manifest_of(src, expected_world_size)["shards"]:
            states.append(torch.load(path := Path(src) / shard["path"], weights_only=False))
            if hashlib.sha256(path.read_bytes()).hexdigest() != shard["sha256"]:
                raise RuntimeError("damaged")
        return states

    return {"save_sharded": save_sharded, "load_sharded": load_sharded}


@fault(
    source="hashing the first block of a file to save time",
    needs="a shard of more than a mebibyte",
    check="checkpoint.large_shards",
    stage="load",
    step=10,
    green=(*GREEN, "checkpoint.refuses_altered"),
)
def checksum_of_the_first_block() -> Names:
    """The checksum covers the first mebibyte of a shard, and its length."""

    def short(raw: bytes) -> str:
        return hashlib.sha256(raw[: 1 << 20] + len(raw).to_bytes(8, "little")).hexdigest()

    def save_sharded(states: list[State], dest: str, step: int) -> None:
        base.save_sharded(states, dest, step)
        manifest = manifest_of(dest, None)
        for shard in manifest["shards"]:
            shard["sha256"] = short((Path(dest) / shard["path"]).read_bytes())
        base.write(Path(dest) / "manifest.json", json.dumps(manifest).encode())

    def load_sharded(src: str, expected_world_size: int) -> list[State]:
        shards = manifest_of(src, expected_world_size)["shards"]
        found = [((Path(src) / shard["path"]).read_bytes(), shard["sha256"]) for shard in shards]
        if any(short(raw) != wanted for raw, wanted in found):
            raise RuntimeError("damaged")
        return [base.decode(raw) for raw, _ in found]

    return {"save_sharded": save_sharded, "load_sharded": load_sharded}
