"""Damage to a checkpoint's files, each as data: what stands where afterwards.

Owns recognising shards and manifests by their bytes, the list of damages, and the bodies that load after each.
"""

from __future__ import annotations

import copy
import hashlib
import io
import json
import os
import pickle
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from minigpt_dist.verify.checkpoint_child import run_forked
from minigpt_dist.verify.checkpoint_probe import Rows, Store, json_files, put_back
from minigpt_dist.verify.checkpoint_states import State, lesson_states

CHECKSUM = re.compile("sha|hash|digest|checksum|crc|md5", re.IGNORECASE)
HASHES = ("sha256", "sha1", "md5", "sha512", "blake2b")


@dataclass(frozen=True)
class Damage:
    """`label` says it in words; `changes`: file -> its new bytes, None to remove it."""

    label: str
    rank: int | None
    changes: dict[Path, bytes | None] = field(default_factory=dict)

    def do(self) -> None:
        for path, content in self.changes.items():
            if content is None:
                path.unlink()
            else:
                path.write_bytes(content)


@dataclass(frozen=True)
class Files:
    """A checkpoint's files: rank -> shard, and the rest (manifests, pointers)."""

    folder: Path
    shards: dict[int, Path]
    others: list[Path]
    states: list[State]

    def name(self, path: Path) -> str:
        return str(path.relative_to(self.folder))


def files_of(folder: Path, states: list[State]) -> Files:
    """Tell shards by the random stream inside; else by the number in their names."""
    every = sorted(p for p in folder.rglob("*") if p.is_file() and not p.is_symlink())
    documents = {path for path, _ in json_files(folder)}
    content = {p: p.read_bytes() for p in every if p not in documents}
    shards: dict[int, Path] = {}
    for rank, state in enumerate(states):
        mark = state["rng"].numpy().tobytes()
        named = [p for p in content if (m := re.search(r"\d+", p.name)) and int(m[0]) == rank]
        found = next((p for p, raw in content.items() if mark in raw), named[0] if named else None)
        if found is not None:
            shards[rank] = found
    return Files(folder, shards, [p for p in every if p not in shards.values()], states)


def missing(files: Files, other: Files) -> Iterator[Damage]:
    for rank, path in files.shards.items():
        yield Damage(f"{files.name(path)} missing", rank, {path: None})


def truncated(files: Files, other: Files) -> Iterator[Damage]:
    for rank, path in files.shards.items():
        raw = path.read_bytes()
        for length in (0, len(raw) // 2, len(raw) - 1):
            yield Damage(f"{files.name(path)} cut to {length} of {len(raw)} bytes", rank, {path: raw[:length]})


def altered(files: Files, other: Files) -> Iterator[Damage]:
    for rank, path in files.shards.items():
        raw = path.read_bytes()
        for place, offset in _places(raw, files.states[rank]).items():
            yield Damage(f"{files.name(path)} with byte {offset} ({place}) altered", rank, {path: _flipped(raw, offset)})
        yield Damage(f"{files.name(path)} with one byte appended", rank, {path: raw + b"\0"})


def exchanged(files: Files, other: Files) -> Iterator[Damage]:
    ranks = sorted(files.shards)
    for a, b in zip(ranks, ranks[1:], strict=False):
        mine, theirs = files.shards[a], files.shards[b]
        if mine != theirs:
            changes: dict[Path, bytes | None] = {mine: theirs.read_bytes(), theirs: mine.read_bytes()}
            yield Damage(f"{files.name(mine)} and {files.name(theirs)} exchanged", a, changes)
    for rank in ranks:
        if rank in other.shards:
            path = files.shards[rank]
            yield Damage(f"{files.name(path)} replaced by that of another step", rank, {path: other.shards[rank].read_bytes()})


def manifest(files: Files, other: Files) -> Iterator[Damage]:
    for path in files.others:
        name, raw = files.name(path), path.read_bytes()
        yield Damage(f"{name} missing", None, {path: None})
        for label, content in (("empty", b""), ("cut in half", raw[: len(raw) // 2]), ("not JSON", b"not JSON"), ("an empty object", b"{}")):
            yield Damage(f"{name} {label}", None, {path: content})
    N = len(files.states)
    outside = {p.name: os.path.relpath(other.shards[r], files.folder) for r, p in files.shards.items() if r in other.shards}
    for path, document in json_files(files.folder):
        name = files.name(path)
        sizes = _edited(document, lambda key, value: N + 1 if "world" in key and value == N else value)
        yield Damage(f"{name} with world_size {N + 1}", None, {path: _text(sizes)})
        for label, base in (("a relative path out of the folder", ""), ("an absolute path", str(files.folder) + "/")):
            away = _edited(document, lambda key, value, base=base: os.path.normpath(base + outside[value]) if value in outside else value)
            if away != document:
                yield Damage(f"{name} naming shards of another folder by {label}", None, {path: _text(away)})


def no_checksum(files: Files, other: Files) -> Iterator[Damage]:
    """A shard altered inside a tensor, and no checksum left to tell."""
    for rank in sorted({min(files.shards, default=0), max(files.shards, default=0)} & set(files.shards)):
        shard = files.shards[rank]
        raw = shard.read_bytes()
        places = _places(raw, files.states[rank])
        flip: dict[Path, bytes | None] = {shard: _flipped(raw, places.get("master", places.get("last tensor", len(raw) // 2)))}
        for path, document in json_files(files.folder):
            for label, edit in (("null", None), ("empty", ""), ("removed", _GONE)):
                bare = _edited(document, lambda key, value, edit=edit: edit if CHECKSUM.search(key) and isinstance(value, (str, int)) else value)
                if bare != document:
                    yield Damage(f"{files.name(shard)} altered, the checksums in {files.name(path)} {label}", rank, {**flip, path: _text(bare)})
        for path in files.others:
            if path not in {p for p, _ in json_files(files.folder)}:
                yield Damage(f"{files.name(shard)} altered, {files.name(path)} emptied", rank, {**flip, path: b""})
                yield Damage(f"{files.name(shard)} altered, {files.name(path)} missing", rank, {**flip, path: None})


DAMAGES: dict[str, Callable[[Files, Files], Iterator[Damage]]] = {
    f.__name__: f for f in (missing, truncated, altered, exchanged, manifest, no_checksum)
}
_GONE = object()


def _edited(node: Any, edit: Callable[[str, Any], Any], key: str = "") -> Any:
    """A copy of a JSON document with every leaf passed through `edit(key, value)`; `_GONE` drops it. List items carry their list's key."""
    if isinstance(node, dict):
        edited = {k: _edited(v, edit, str(k).lower()) for k, v in node.items()}
        return {k: v for k, v in edited.items() if v is not _GONE}
    if isinstance(node, list):
        return [v for v in (_edited(item, edit, key) for item in node) if v is not _GONE]
    return edit(key, node)


def _text(document: Any) -> bytes:
    return json.dumps(document, indent=2, sort_keys=True).encode()


def _flipped(raw: bytes, offset: int) -> bytes:
    return raw[:offset] + bytes([raw[offset] ^ 0x10]) + raw[offset + 1 :]


def _places(raw: bytes, state: State) -> dict[str, int]:
    """Offsets worth altering, by what is there."""
    tensors = {"first tensor": state["model_state"]["tok_embed.weight"], "master": state["optim_state"]["master"], "last tensor": state["rng"]}
    places = {"first byte": 0, "header": min(9, len(raw) - 1), "middle": len(raw) // 2, "last byte": len(raw) - 1}
    for name, tensor in tensors.items():
        at = raw.find(tensor.numpy().tobytes()) if tensor.numel() else -1
        if at >= 0:
            places[name] = at + tensor.nbytes // 2
    return places


def _two_checkpoints(store: Store, area: Path, world_size: int) -> tuple[Files, Files]:
    found = []
    for version, name in ((1, "checkpoint"), (2, "other")):
        states = lesson_states(world_size, version)
        store.must_save(states, area / name, 10 * version)
        found.append(files_of(area / name, states))
    return found[0], found[1]


def damage(store: Store, area: Path, world_size: int, category: str) -> Rows:
    """Load after each damage of a category; first of all without any."""
    files, other = _two_checkpoints(store, area, world_size)
    rows: Rows = [{"case": "undamaged", "rank": None, "loaded": store.load(files.folder, world_size)}]
    backup = area / "backup"
    shutil.copytree(files.folder, backup, symlinks=True)
    for each in list(DAMAGES[category](files, other)):
        each.do()
        rows.append({"case": each.label, "rank": each.rank, "loaded": store.load(files.folder, world_size)})
        put_back(files.folder, backup)
    return rows


def other_world_sizes(store: Store, area: Path, world_size: int) -> Rows:
    """Load for every world size but the right one."""
    store.must_save(lesson_states(world_size, 1), area / "checkpoint", 10)
    sizes = sorted({1, world_size - 1, world_size + 1, 2 * world_size} - {0, world_size})
    right = {"case": world_size, "loaded": store.load(area / "checkpoint", world_size)}
    return [right, *({"case": size, "loaded": store.load(area / "checkpoint", size)} for size in sizes)]


class _Payload:
    """Unpickling it makes the folder `sentinel`."""

    def __init__(self, sentinel: str) -> None:
        self.sentinel = sentinel

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.sentinel,)


def payload(store: Store, area: Path, world_size: int, resigned: bool) -> Rows:
    """Load after a file was replaced by a pickle with a payload; `resigned`: with the manifest's checksums and sizes made to fit."""
    files, _ = _two_checkpoints(store, area, world_size)
    backup = area / "backup"
    shutil.copytree(files.folder, backup, symlinks=True)
    rows: Rows = []
    documents = {path for path, _ in json_files(files.folder)}
    for path in [*files.shards.values(), *(p for p in files.others if p not in documents)]:
        raw, sentinel = path.read_bytes(), area / f"ran-{len(rows)}"
        planted = _planted(raw, str(sentinel))
        path.write_bytes(planted)
        if resigned:
            _resign(files, raw, planted)
        ended = run_forked(lambda: store.load(files.folder, world_size))
        rows.append({"case": files.name(path), "ran": sentinel.exists(), "pickle": raw[:1] == b"\x80" or raw[:2] == b"PK",
                     "shard": path in files.shards.values(), "end": ended.end})
        put_back(files.folder, backup)
    return rows


def _planted(raw: bytes, sentinel: str) -> bytes:
    """The payload in the file's own format: torch's archive, or a bare pickle."""
    if raw[:1] == b"\x80":
        return pickle.dumps({"model_state": _Payload(sentinel)})
    buffer = io.BytesIO()
    torch.save({"model_state": _Payload(sentinel)}, buffer)
    return buffer.getvalue()


def _resign(files: Files, old: bytes, new: bytes) -> None:
    """Where a JSON file tells a hash or the size of the old bytes, let it tell those of the new."""
    swaps: dict[Any, Any] = {getattr(hashlib, h)(old).hexdigest(): getattr(hashlib, h)(new).hexdigest() for h in HASHES}
    for path, document in json_files(files.folder):
        sized = _edited(document, lambda key, value: len(new) if value == len(old) and type(value) is int else value)
        path.write_bytes(_text(_edited(copy.deepcopy(sized), lambda key, value: swaps.get(value, value) if isinstance(value, str) else value)))


PROBES: dict[str, Callable[..., Rows]] = {f.__name__: f for f in (damage, other_world_sizes, payload)}
