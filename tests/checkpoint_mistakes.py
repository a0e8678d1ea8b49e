"""Wrong checkpoint pieces for the judge to judge, each right but for one mistake, with the check that must fail it.

A spec is a file, so tests write one that says `from checkpoint_mistakes import IMPLEMENTATIONS` and takes one of them. Here are those
that a save and a load show; the table has those of `checkpoint_mistakes_damage.py` too.
"""

from __future__ import annotations

import copy
import json
import os
import pickle
import threading
import time
from pathlib import Path
from typing import Any

import torch
from checkpoint_doubles import RIGHT, Lesson, State
from checkpoint_mistakes_damage import (
    AnyRanksHash,
    AnyWorldSize,
    DiskFullSwallowed,
    FilesCountedWithoutManifest,
    FinalNames,
    FinalNamesInCpp,
    HashOfTheStart,
    LoadsThenVerifies,
    MissingShardSkipped,
    MixtureUnnoticed,
    NullChecksumAccepted,
    OldMovedAwayFirst,
    OldRemovedFirst,
    OnlyMoreRanksRefused,
    OthersRotatedAway,
    StaleTemporaryExtended,
    StaleTemporaryStops,
    Unverified,
    WarnsAndReturnsNone,
)

from minigpt_dist.verify.faults import base


class SortedAsText(Lesson):
    def load(self, src_dir: str, expected_world_size: int) -> Any:
        super().load(src_dir, expected_world_size)
        return [self.decode(path.read_bytes()) for path in sorted(Path(src_dir).glob("rank*.bin"))]


class StaleShardsCounted(Lesson):
    def load(self, src_dir: str, expected_world_size: int) -> Any:
        super().load(src_dir, expected_world_size)
        found = sorted(Path(src_dir).glob("rank*.bin"), key=lambda path: int(path.stem.removeprefix("rank")))
        return [self.decode(path.read_bytes()) for path in found]


class FirstRankForAll(Lesson):
    def save(self, states: list[State], dest_dir: str, step: int) -> Any:
        return super().save([states[0]] * len(states), dest_dir, step)


class EveryFileHoldsAll(Lesson):
    def save(self, states: list[State], dest_dir: str, step: int) -> Any:
        return super().save([{"all": states} for _ in states], dest_dir, step)

    def load(self, src_dir: str, expected_world_size: int) -> Any:
        return [state["all"][rank] for rank, state in enumerate(super().load(src_dir, expected_world_size))]


class CastToFloat32(Lesson):
    def encode(self, state: State) -> bytes:
        state = copy.deepcopy(state)
        for name, value in state["optim_state"].items():
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                state["optim_state"][name] = value.float()
        return super().encode(state)


class NonesDropped(Lesson):
    def encode(self, state: State) -> bytes:
        optim = {name: value for name, value in state["optim_state"].items() if value is not None}
        return super().encode({**state, "optim_state": optim})


class StatesConsumed(Lesson):
    def encode(self, state: State) -> bytes:
        return super().encode({"optim_state": state.pop("optim_state"), **state})


class WrittenAfterReturn(Lesson):
    def save(self, states: list[State], dest_dir: str, step: int) -> Any:
        def later() -> None:
            time.sleep(0.05)  # the mistake itself: the load comes before this is over
            Lesson.save(self, states, dest_dir, step)

        threading.Thread(target=later).start()


class Remembered(Lesson):
    memory: dict[str, Any] = {}  # noqa: RUF012 - shared on purpose: that is the mistake

    def save(self, states: list[State], dest_dir: str, step: int) -> Any:
        self.memory[dest_dir] = states
        return super().save(states, dest_dir, step)

    def load(self, src_dir: str, expected_world_size: int) -> Any:
        return self.memory.get(src_dir) or super().load(src_dir, expected_world_size)


class OneFolderForAll(Lesson):
    def folder(self, dest_dir: str) -> Path:
        return Path(dest_dir).parent / "latest-here"


class ManifestInWorkingDirectory(Lesson):
    def save(self, states: list[State], dest_dir: str, step: int) -> Any:
        manifest = super().save(states, dest_dir, step)
        Path("last_manifest.json").write_text(json.dumps(manifest))
        return manifest


class PathsFromWorkingDirectory(Lesson):
    def manifest(self, shards: list[dict[str, Any]], step: int) -> dict[str, Any]:
        return super().manifest([shard | {"file": os.path.join(self.dest, shard["path"])} for shard in shards], step)

    def save(self, states: list[State], dest_dir: str, step: int) -> Any:
        self.dest = dest_dir
        return super().save(states, dest_dir, step)

    def read(self, src: Path, shard: dict[str, Any], manifest: dict[str, Any]) -> State:
        return super().read(Path(), {**shard, "path": shard["file"]}, manifest)


class StepIsWorldSize(Lesson):
    def manifest(self, shards: list[dict[str, Any]], step: int) -> dict[str, Any]:
        return super().manifest(shards, len(shards))


class StepForgotten(Lesson):
    def manifest(self, shards: list[dict[str, Any]], step: int) -> dict[str, Any]:
        return {"world_size": len(shards), "shards": shards}


class PickledSideFile(Lesson):
    """Shards are safetensors, and the random streams beside them a pickle."""

    def encode(self, state: State) -> bytes:
        return base.encode({name: value for name, value in state.items() if name != "rng"})

    def decode(self, raw: bytes) -> State:
        return base.decode(raw)

    def save(self, states: list[State], dest_dir: str, step: int) -> Any:
        manifest = super().save(states, dest_dir, step)
        (Path(dest_dir) / "streams.pkl").write_bytes(pickle.dumps([state.get("rng") for state in states]))
        return manifest

    def load(self, src_dir: str, expected_world_size: int) -> Any:
        states = super().load(src_dir, expected_world_size)
        streams = pickle.loads((Path(src_dir) / "streams.pkl").read_bytes())
        return [state | {"rng": rng} for state, rng in zip(states, streams, strict=True)]


WRONG: dict[type[Lesson], tuple[str, int]] = {
    Unverified: ("refuses_altered", 2),
    NullChecksumAccepted: ("refuses_no_checksum", 2),
    HashOfTheStart: ("refuses_altered", 2),
    AnyRanksHash: ("refuses_exchanged", 2),
    LoadsThenVerifies: ("refuses_before_loading", 2),
    AnyWorldSize: ("refuses_world_size", 2),
    OnlyMoreRanksRefused: ("refuses_world_size", 2),
    MissingShardSkipped: ("refuses_missing", 2),
    WarnsAndReturnsNone: ("refuses_truncated", 2),
    FilesCountedWithoutManifest: ("refuses_manifest", 2),
    FinalNames: ("killed_save", 2),
    FinalNamesInCpp: ("killed_save", 2),
    OldRemovedFirst: ("killed_save", 2),
    OldMovedAwayFirst: ("killed_save", 2),
    MixtureUnnoticed: ("killed_save", 2),
    OthersRotatedAway: ("killed_first_save", 2),
    StaleTemporaryStops: ("killed_first_save", 2),
    StaleTemporaryExtended: ("killed_first_save", 2),
    DiskFullSwallowed: ("disk_full", 2),
    SortedAsText: ("round_trip", 11),
    StaleShardsCounted: ("overwrite", 2),
    FirstRankForAll: ("round_trip", 2),
    EveryFileHoldsAll: ("one_file_a_rank", 3),
    CastToFloat32: ("tensors", 2),
    NonesDropped: ("values", 2),
    StatesConsumed: ("states_untouched", 2),
    WrittenAfterReturn: ("independent", 2),
    Remembered: ("independent", 2),
    OneFolderForAll: ("side_by_side", 2),
    ManifestInWorkingDirectory: ("paths", 2),
    PathsFromWorkingDirectory: ("paths", 2),
    StepIsWorldSize: ("records_step", 2),
    StepForgotten: ("records_step", 2),
    PickledSideFile: ("runs_no_pickle", 2),
}
IMPLEMENTATIONS: dict[str, type[Lesson]] = {**RIGHT, **{double.__name__: double for double in WRONG}}
