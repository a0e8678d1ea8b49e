"""Damage to a checkpoint's files, each as data: what stands where afterwards.

Owns recognising shards and manifests by their bytes, the list of damages, and the bodies that load after each.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from minigpt_dist.verify.checkpoint_states import State, lesson_states, mark
from minigpt_dist.verify.checkpoint_store import Rows, Store, json_files, put_back

CHECKSUM = re.compile("sha[0-9]|hash|digest|checksum|crc|md5", re.IGNORECASE)
DIGITS = re.compile("[0-9a-f]{32,128}")
_GONE = object()


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
        """The path within the checkpoint."""
        return str(path.relative_to(self.folder))

    def documents(self) -> list[tuple[Path, Any]]:
        """Those of the others that hold a JSON object, and it."""
        return [(path, document) for path, document in json_files(self.folder) if path in self.others]


def files_of(folder: Path, states: list[State]) -> Files:
    """Tell shards by the rank's own bytes inside; else by the number in their names, JSON last."""
    every = sorted(p for p in folder.rglob("*") if p.is_file() and not p.is_symlink())
    documents = [path for path, _ in json_files(folder)]
    content = {path: path.read_bytes() for path in sorted(every, key=lambda path: path in documents)}
    shards: dict[int, Path] = {}
    for rank, state in enumerate(states):
        marked = [p for p, raw in content.items() if mark(state) in raw]
        named = [p for p in content if (m := re.search(r"\d+", p.name)) and int(m[0]) == rank]
        if marked or named:
            shards[rank] = (marked or named)[0]
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
            yield Damage(
                f"{files.name(path)} with byte {offset} ({place}) altered", rank, {path: _flipped(raw, offset)}
            )
        yield Damage(f"{files.name(path)} with one byte appended", rank, {path: raw + b"\0"})


def exchanged(files: Files, other: Files) -> Iterator[Damage]:
    ranks = sorted(files.shards)
    for a, b in itertools.pairwise(ranks):
        mine, theirs = files.shards[a], files.shards[b]
        if mine != theirs:
            changes: dict[Path, bytes | None] = {mine: theirs.read_bytes(), theirs: mine.read_bytes()}
            yield Damage(f"{files.name(mine)} and {files.name(theirs)} exchanged", a, changes)
    for rank in ranks:
        if rank in other.shards:
            path = files.shards[rank]
            yield Damage(
                f"{files.name(path)} replaced by that of another step", rank, {path: other.shards[rank].read_bytes()}
            )


def manifest(files: Files, other: Files) -> Iterator[Damage]:
    for path in files.others:
        name, raw = files.name(path), path.read_bytes()
        yield Damage(f"{name} missing", None, {path: None})
        torn = {"empty": b"", "cut in half": raw[: len(raw) // 2], "not JSON": b"not JSON", "an empty object": b"{}"}
        for label, content in torn.items():
            yield Damage(f"{name} {label}", None, {path: content})
    N = len(files.states)
    for path, document in files.documents():
        sizes = edited(document, lambda key, value: N + 1 if "world" in key and value == N else value)
        yield Damage(f"{files.name(path)} with world_size {N + 1}", None, {path: text_of(sizes)})
        for base in ("", str(files.folder)):
            away = _naming(document, files, other, base)
            if away != document:
                kind = "an absolute" if base else "a relative"
                label = f"{files.name(path)} naming shards of another folder by {kind} path"
                yield Damage(label, None, {path: text_of(away)})


def _naming(document: Any, files: Files, other: Files, base: str) -> Any:
    """The document with the other checkpoint's shards in place of its own, their paths relative or below `base`."""
    away = {
        files.shards[r].name: os.path.relpath(path, files.folder)
        for r, path in other.shards.items()
        if r in files.shards
    }

    def moved(key: str, value: Any) -> Any:
        return os.path.normpath(os.path.join(base, away[value])) if isinstance(value, str) and value in away else value

    return edited(document, moved)


def no_checksum(files: Files, other: Files) -> Iterator[Damage]:
    """A shard altered inside a tensor, and no checksum left to tell."""
    documents = dict(files.documents())
    for rank in sorted({min(files.shards, default=0), max(files.shards, default=0)} & set(files.shards)):
        shard = files.shards[rank]
        raw = shard.read_bytes()
        places = _places(raw, files.states[rank])
        offset = places.get("master", places.get("last tensor", len(raw) // 2))
        flip, name = {shard: _flipped(raw, offset)}, files.name(shard)
        for path, document in documents.items():
            for label, instead in (("null", None), ("empty", ""), ("removed", _GONE)):
                bare = _unsigned(document, instead)
                if bare != document:
                    what = f"{name} altered, the checksums in {files.name(path)} {label}"
                    yield Damage(what, rank, {**flip, path: text_of(bare)})
        for path in files.others:
            yield Damage(f"{name} altered, {files.name(path)} missing", rank, {**flip, path: None})
            if path not in documents:
                yield Damage(f"{name} altered, {files.name(path)} emptied", rank, {**flip, path: b""})


def _unsigned(document: Any, instead: Any) -> Any:
    """The document with `instead` in place of whatever looks like a checksum, by its key or by its digits."""

    def bare(key: str, value: Any) -> Any:
        named = CHECKSUM.search(key) and isinstance(value, (str, int))
        return instead if named or (isinstance(value, str) and DIGITS.fullmatch(value)) else value

    return edited(document, bare)


DAMAGES: dict[str, Callable[[Files, Files], Iterator[Damage]]] = {
    f.__name__: f for f in (missing, truncated, altered, exchanged, manifest, no_checksum)
}


def edited(node: Any, edit: Callable[[str, Any], Any], key: str = "") -> Any:
    """A copy of a JSON document, each leaf passed through `edit(key, value)`; an item of a list has the list's key."""
    if isinstance(node, dict):
        parts = {k: edited(v, edit, str(k).lower()) for k, v in node.items()}
        return {k: v for k, v in parts.items() if v is not _GONE}
    if isinstance(node, list):
        return [v for v in (edited(item, edit, key) for item in node) if v is not _GONE]
    return edit(key, node)


def text_of(document: Any) -> bytes:
    """A JSON file's content."""
    return json.dumps(document, indent=2, sort_keys=True).encode()


def _flipped(raw: bytes, offset: int) -> bytes:
    return raw[:offset] + bytes([raw[offset] ^ 0x10]) + raw[offset + 1 :]


def _places(raw: bytes, state: State) -> dict[str, int]:
    """Offsets worth altering, by what is there."""
    tensors = {
        "first tensor": state["model_state"]["tok_embed.weight"],
        "master": state["optim_state"]["master"],
        "last tensor": state["rng"],
    }
    places = {"first byte": 0, "header": min(9, len(raw) - 1), "middle": len(raw) // 2, "last byte": len(raw) - 1}
    for name, tensor in tensors.items():
        at = raw.find(tensor.numpy().tobytes()) if tensor.numel() else -1
        if at >= 0:
            places[name] = at + tensor.nbytes // 2
    return places


def two_checkpoints(store: Store, area: Path, world_size: int) -> tuple[Files, Files]:
    """Two checkpoints of different steps and values, in folders side by side."""
    first, second = lesson_states(world_size, 1), lesson_states(world_size, 2)
    store.must_save((first, area / "checkpoint", 10), (second, area / "other", 20))
    return files_of(area / "checkpoint", first), files_of(area / "other", second)


def damage(store: Store, area: Path, world_size: int, category: str) -> Rows:
    """Load after each damage of a category; first of all without any."""
    files, other = two_checkpoints(store, area, world_size)
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
    store.must_save((lesson_states(world_size, 1), area / "checkpoint", 10))
    sizes = sorted({1, world_size - 1, world_size + 1, 2 * world_size} - {0, world_size})
    right = {"case": world_size, "loaded": store.load(area / "checkpoint", world_size)}
    return [right, *({"case": size, "loaded": store.load(area / "checkpoint", size)} for size in sizes)]


PROBES: dict[str, Callable[..., Rows]] = {f.__name__: f for f in (damage, other_world_sizes)}
