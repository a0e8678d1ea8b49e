"""Wrong checkpoint pieces that damage shows: files that are believed as they are, saves that leave nothing good behind."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from checkpoint_doubles import Lesson, State


class Unverified(Lesson):
    def verify(self, raw: bytes, shard: dict[str, Any], manifest: dict[str, Any]) -> None:
        pass


class NullChecksumAccepted(Lesson):
    def verify(self, raw: bytes, shard: dict[str, Any], manifest: dict[str, Any]) -> None:
        if shard.get("sha256"):
            super().verify(raw, shard, manifest)


class HashOfTheStart(Lesson):
    def sha(self, raw: bytes) -> str:
        return super().sha(raw[:1024])


class AnyRanksHash(Lesson):
    def verify(self, raw: bytes, shard: dict[str, Any], manifest: dict[str, Any]) -> None:
        if self.sha(raw) not in {each["sha256"] for each in manifest["shards"]}:
            raise RuntimeError("unknown shard")


class LoadsThenVerifies(Lesson):
    def read(self, src: Path, shard: dict[str, Any], manifest: dict[str, Any]) -> State:
        raw = (src / shard["path"]).read_bytes()
        with suppress(EOFError):
            state = self.decode(raw)
        self.verify(raw, shard, manifest)
        return state


class AnyWorldSize(Lesson):
    def check_size(self, manifest: dict[str, Any], expected: int) -> None:
        pass


class OnlyMoreRanksRefused(Lesson):
    def check_size(self, manifest: dict[str, Any], expected: int) -> None:
        if manifest["world_size"] < expected:
            super().check_size(manifest, expected)


class MissingShardSkipped(Lesson):
    def read(self, src: Path, shard: dict[str, Any], manifest: dict[str, Any]) -> State:
        return super().read(src, shard, manifest) if (src / shard["path"]).exists() else {}


class WarnsAndReturnsNone(Lesson):
    def load(self, src_dir: str, expected_world_size: int) -> Any:
        try:
            return super().load(src_dir, expected_world_size)
        except Exception as error:
            print("cannot load:", error)
            return None


class FilesCountedWithoutManifest(Lesson):
    def load(self, src_dir: str, expected_world_size: int) -> Any:
        src = Path(src_dir)
        if (src / "manifest.json").exists():
            with suppress(ValueError, KeyError):
                return super().load(src_dir, expected_world_size)
        return [self.decode((src / f"rank{rank}.bin").read_bytes()) for rank in range(expected_world_size - 1)]


class FinalNames(Lesson):
    def temporary(self, path: Path) -> Path:
        return path

    def publish(self, path: Path) -> None:
        pass


class FinalNamesInCpp(FinalNames):
    def encode(self, state: State) -> bytes:
        self.state = state
        return super().encode(state)

    def write(self, path: Path, raw: bytes) -> None:
        if path.suffix == ".bin":
            torch.save(self.state, path, pickle_protocol=4)
        else:
            super().write(path, raw)

    def verify(self, raw: bytes, shard: dict[str, Any], manifest: dict[str, Any]) -> None:
        pass


class OldRemovedFirst(Lesson):
    def save(self, states: list[State], dest_dir: str, step: int) -> Any:
        shutil.rmtree(dest_dir, ignore_errors=True)
        return super().save(states, dest_dir, step)


class OldMovedAwayFirst(Lesson):
    def save(self, states: list[State], dest_dir: str, step: int) -> Any:
        shutil.rmtree(f"{dest_dir}.old", ignore_errors=True)
        if Path(dest_dir).exists():
            os.rename(dest_dir, f"{dest_dir}.old")
        return super().save(states, dest_dir, step)


class MixtureUnnoticed(Unverified):
    """Shards are renamed one by one, and nothing tells new ones from old."""


class OthersRotatedAway(Lesson):
    def save(self, states: list[State], dest_dir: str, step: int) -> Any:
        for sibling in Path(dest_dir).parent.iterdir():
            if sibling.name != Path(dest_dir).name:
                shutil.rmtree(sibling)
        return super().save(states, dest_dir, step)


class StaleTemporaryStops(Lesson):
    def write(self, path: Path, raw: bytes) -> None:
        with open(path, "xb") as f:
            f.write(raw)


class StaleTemporaryExtended(Lesson):
    def write(self, path: Path, raw: bytes) -> None:
        with open(path, "ab") as f:
            f.write(raw)


class DiskFullSwallowed(Lesson):
    def write(self, path: Path, raw: bytes) -> None:
        try:
            super().write(path, raw)
        except OSError as error:
            print("warning:", error)
