"""Right checkpoint pieces for the judge to judge, in several styles: none may be failed.

All build on `Lesson`: pickled by torch.save, written under temporary names, renamed, with sha256 in a manifest.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

State = dict[str, Any]


@dataclass
class ShardManifest:
    world_size: int
    step: int
    shards: list[dict[str, Any]]


class Lesson:
    """The published lesson's way. Ranks unpickle their own files: it is their code."""

    def encode(self, state: State) -> bytes:
        buffer = io.BytesIO()
        torch.save(state, buffer, pickle_protocol=4)
        return buffer.getvalue()

    def decode(self, raw: bytes) -> State:
        state: State = torch.load(io.BytesIO(raw), weights_only=False)
        return state

    def sha(self, raw: bytes) -> str:
        return hashlib.sha256(raw).hexdigest()

    def write(self, path: Path, raw: bytes) -> None:
        with open(path, "wb") as f:
            f.write(raw)
            f.flush()
            os.fsync(f.fileno())

    def temporary(self, path: Path) -> Path:
        return path.with_name(path.name + ".tmp")

    def publish(self, path: Path) -> None:
        os.replace(self.temporary(path), path)

    def folder(self, dest_dir: str) -> Path:
        return Path(dest_dir)

    def manifest(self, shards: list[dict[str, Any]], step: int) -> dict[str, Any]:
        return {"world_size": len(shards), "step": step, "shards": shards}

    def save(self, states: list[State], dest_dir: str, step: int) -> Any:
        dest = self.folder(dest_dir)
        dest.mkdir(parents=True, exist_ok=True)
        shards: list[dict[str, Any]] = []
        for rank, state in enumerate(states):
            raw = self.encode(state)
            self.write(self.temporary(dest / f"rank{rank}.bin"), raw)
            shards.append({"rank": rank, "path": f"rank{rank}.bin", "sha256": self.sha(raw)})
        manifest = self.manifest(shards, step)
        self.write(self.temporary(dest / "manifest.json"), json.dumps(manifest).encode())
        for shard in shards:
            self.publish(dest / shard["path"])
        self.publish(dest / "manifest.json")
        return manifest

    def check_size(self, manifest: dict[str, Any], expected: int) -> None:
        if manifest["world_size"] != expected:
            raise RuntimeError(f"world_size mismatch: manifest={manifest['world_size']}, expected={expected}")

    def verify(self, raw: bytes, shard: dict[str, Any], manifest: dict[str, Any]) -> None:
        if self.sha(raw) != shard["sha256"]:
            raise RuntimeError(f"sha256 mismatch on rank {shard['rank']}")

    def read(self, src: Path, shard: dict[str, Any], manifest: dict[str, Any]) -> State:
        raw = (src / shard["path"]).read_bytes()
        self.verify(raw, shard, manifest)
        return self.decode(raw)

    def load(self, src_dir: str, expected_world_size: int) -> Any:
        src = self.folder(src_dir)
        manifest = json.loads((src / "manifest.json").read_text())
        self.check_size(manifest, expected_world_size)
        states: list[Any] = [None] * manifest["world_size"]
        for shard in manifest["shards"]:
            states[shard["rank"]] = self.read(src, shard, manifest)
        return states


class Paired(Lesson):
    """save returns the manifest as an object, load the pair of it and the list."""

    def save(self, states: list[State], dest_dir: str, step: int) -> Any:
        return ShardManifest(**super().save(states, dest_dir, step))

    def load(self, src_dir: str, expected_world_size: int) -> Any:
        states = super().load(src_dir, expected_world_size)
        return ShardManifest(**json.loads((Path(src_dir) / "manifest.json").read_text())), states


class FolderSwap(Lesson):
    """Everything is written to a sibling folder, which takes the place of the old one."""

    def save(self, states: list[State], dest_dir: str, step: int) -> Any:
        aside, dest = Path(f"{dest_dir}.new"), Path(dest_dir)
        shutil.rmtree(aside, ignore_errors=True)
        manifest = super().save(states, str(aside), step)
        shutil.rmtree(dest, ignore_errors=True)
        aside.rename(dest)
        return manifest


class FileByFile(Paired):
    """Each file is written under a temporary name and renamed before the next is begun."""

    def write(self, path: Path, raw: bytes) -> None:
        super().write(path, raw)
        super().publish(path.with_name(path.name.removesuffix(".tmp")))

    def publish(self, path: Path) -> None:
        pass


class OtherLanguages(Lesson):
    """Shards are written and read by the libraries' own C++ and Rust: torch.save and safetensors, each to a path."""

    def encode(self, state: State) -> bytes:
        self.state = state
        return b""

    def write(self, path: Path, raw: bytes) -> None:
        if raw:
            super().write(path, raw)
        else:
            torch.save(self.state, path)
            safetensors.torch.save_file(self.state["model_state"], f"{path}.safetensors")

    def publish(self, path: Path) -> None:
        super().publish(path)
        if path.suffix == ".bin":
            os.replace(f"{self.temporary(path)}.safetensors", f"{path}.safetensors")

    def manifest(self, shards: list[dict[str, Any]], step: int) -> dict[str, Any]:
        return super().manifest([shard | {"sha256": None} for shard in shards], step)

    def save(self, states: list[State], dest_dir: str, step: int) -> Any:
        manifest = super().save(states, dest_dir, step)
        for shard in manifest["shards"]:
            shard["sha256"] = self.sha((Path(dest_dir) / shard["path"]).read_bytes())
        Lesson.write(self, Path(dest_dir) / "manifest.json.tmp", json.dumps(manifest).encode())
        os.replace(Path(dest_dir) / "manifest.json.tmp", Path(dest_dir) / "manifest.json")
        return manifest


class Zipped(Lesson):
    """Compressed: no tensor's bytes are in a file. load returns a pair with the manifest as a mapping."""

    def load(self, src_dir: str, expected_world_size: int) -> Any:
        return json.loads((Path(src_dir) / "manifest.json").read_text()), super().load(src_dir, expected_world_size)

    def encode(self, state: State) -> bytes:
        return gzip.compress(super().encode(state), 1)

    def decode(self, raw: bytes) -> State:
        return super().decode(gzip.decompress(raw))


class NeverTwice(Lesson):
    """A folder that is there already is refused."""

    def save(self, states: list[State], dest_dir: str, step: int) -> Any:
        if Path(dest_dir).exists():
            raise FileExistsError(f"{dest_dir} exists")
        aside = Path(f"{dest_dir}.new")
        shutil.rmtree(aside, ignore_errors=True)
        super().save(states, str(aside), step)
        aside.rename(dest_dir)


class ManyThreads(Lesson):
    """Four threads work on the tensors at once, each the first of its thread to: torch makes its pool anew after a fork."""

    def save(self, states: list[State], dest_dir: str, step: int) -> Any:
        together = threading.Barrier(4)

        def work(_: int) -> float:
            together.wait()
            return torch.ones(100_000).sum().item()

        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(work, range(4))) == [100_000] * 4
        return super().save(states, dest_dir, step)


RIGHT = {
    "lesson": Lesson,
    "folder-swap": FolderSwap,
    "file-by-file": FileByFile,
    "other-languages": OtherLanguages,
    "zipped": Zipped,
    "never-twice": NeverTwice,
    "many-threads": ManyThreads,
}
