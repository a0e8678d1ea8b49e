"""The manifest: what a checkpoint is made of, exactly, as JSON that carries its own checksum.

It names no host, no absolute path and no time, so equal states give equal bytes. Its text is canonical: the reader
writes what it parsed again and compares, so every byte of the file matters.

Owns the schema, its strict parser and its checksum. Leaves the shards' bytes to `shard_file`.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from minigpt_dist.checkpoint.errors import mismatch
from minigpt_dist.checkpoint.flat_slice import FlatSlice
from minigpt_dist.checkpoint.state import MAX_DEPTH

__all__ = ["MANIFEST_NAME", "Manifest", "ShardRecord", "TensorRecord", "checked_meta", "shard_name", "shard_record"]

MANIFEST_NAME = "manifest.json"
SCHEMA = {"name": "minigpt-dist-checkpoint", "version": 1}
MANIFEST_KEYS = {"schema", "step", "world_size", "meta", "shards", "checksum"}


@dataclass(frozen=True)
class TensorRecord:
    """One tensor's dtype (torch's name, such as "bfloat16") and shape."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class ShardRecord:
    """One rank's file: its size, its checksums, what it holds.

    `slices` says which elements of the flat optimizer state are this rank's, `tensors` what tensors the file has; both
    are keyed by the place in the state, a JSON pointer.
    """

    file: str
    bytes: int
    sha256: str
    crc32: str
    slices: dict[str, FlatSlice]
    tensors: dict[str, TensorRecord]


@dataclass(frozen=True)
class Manifest:
    """A whole checkpoint: `shards[r]` is rank r's file; `meta` is the caller's own JSON (layout, data position)."""

    step: int
    world_size: int
    shards: tuple[ShardRecord, ...]
    meta: dict[str, Any] = field(default_factory=dict)

    @property
    def checksum(self) -> str:
        """sha256 of the canonical text without its checksum line; 64 hexadecimal digits."""
        return hashlib.sha256(_canonical(self._content()).encode()).hexdigest()

    def to_json(self) -> str:
        """The canonical text, which is the file's content byte for byte."""
        return _canonical({**self._content(), "checksum": self.checksum})

    def _content(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "step": self.step,
            "world_size": self.world_size,
            "meta": self.meta,
            "shards": [asdict(shard) for shard in self.shards],
        }

    @staticmethod
    def from_json(text: str, file: Path | str = MANIFEST_NAME) -> Manifest:
        """Parses and checks a manifest; `file` is only named in errors.

        Raises:
            CheckpointError: another schema, a wrong checksum, a missing, extra or ill-typed field, a shard file
                name other than `shard_name` gives, or bytes that differ from the canonical text.
        """
        document = _parse(text, file)
        if document.get("schema") != SCHEMA:
            raise mismatch(file, f"schema {SCHEMA}", document.get("schema"))
        try:
            manifest = _manifest_of(document)
            checksum, canonical = manifest.checksum, manifest.to_json()
        except (ValueError, RecursionError) as error:
            raise mismatch(file, "a well-formed manifest", error) from error
        if document["checksum"] != checksum:
            raise mismatch(file, f"checksum {checksum} of its content", repr(document["checksum"]))
        if text != canonical:
            raise mismatch(file, "the canonical text of its content", "other bytes with the same meaning")
        return manifest


def shard_name(rank: int, world_size: int) -> str:
    """The file name of `rank`'s shard."""
    return f"rank-{rank:05d}-of-{world_size:05d}.safetensors"


def checked_meta(meta: dict[str, Any] | None) -> dict[str, Any]:
    """`meta` as it will be read back, {} for None.

    Raises:
        ValueError: not a mapping of str keys to JSON values that come back equal (lists, not tuples; no nan), or nested
            deeper than `MAX_DEPTH`.
    """
    try:
        back: dict[str, Any] = json.loads(json.dumps(meta or {}, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"meta must be JSON, but: {error}") from error
    if type(back) is not dict or back != (meta or {}):
        raise ValueError(f"meta must be a mapping with str keys and JSON values (lists, not tuples), but is {meta!r}")
    if _is_deeper(back, MAX_DEPTH):
        raise ValueError(f"meta must be nested at most {MAX_DEPTH} deep")
    return back


def _is_deeper(node: Any, levels: int) -> bool:
    inner = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    return levels < 0 or any(_is_deeper(item, levels - 1) for item in inner)


def _canonical(content: dict[str, Any]) -> str:
    return json.dumps(content, sort_keys=True, indent=2, ensure_ascii=True, allow_nan=False) + "\n"


def _parse(text: str, file: Path | str) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise mismatch(file, "a JSON object", f"{type(error).__name__}: {error}") from error
    if not isinstance(document, dict):
        raise mismatch(file, "a JSON object", type(document).__name__)
    return document


def _manifest_of(document: dict[str, Any]) -> Manifest:
    _need_keys(document, MANIFEST_KEYS, "manifest")
    step, world_size = _count(document, "step"), _count(document, "world_size")
    if not isinstance(document["meta"], dict):
        raise ValueError("meta is not an object")
    if not isinstance(document["shards"], list) or len(document["shards"]) != world_size:
        raise ValueError(f"shards is not a list of {world_size} records")
    shards = tuple(shard_record(item, rank, world_size) for rank, item in enumerate(document["shards"]))
    return Manifest(step, world_size, shards, document["meta"])


def shard_record(item: Any, rank: int, world_size: int) -> ShardRecord:
    """The record of `rank`'s shard from its JSON object, as `dataclasses.asdict` gives it. ValueError if ill-formed."""
    where = f"shard {rank}"
    _need_keys(item, set(ShardRecord.__dataclass_fields__), where)
    # An exact name leaves no room for a path, an absolute name, or one rank's file listed twice.
    if item["file"] != shard_name(rank, world_size):
        raise ValueError(f"{where} is the file {item['file']!r}, not {shard_name(rank, world_size)!r}")
    sha256, crc32 = _hex(item, "sha256", 64, where), _hex(item, "crc32", 8, where)
    tensors = {name: _tensor_of(record, f"{where} {name}") for name, record in _mapping(item, "tensors", where).items()}
    slices = {place: _slice_of(record, f"{where} {place}") for place, record in _mapping(item, "slices", where).items()}
    return ShardRecord(item["file"], _count(item, "bytes"), sha256, crc32, slices, tensors)


def _slice_of(item: Any, where: str) -> FlatSlice:
    _need_keys(item, {"offset", "numel", "total"}, where)
    return FlatSlice(*(_count(item, key) for key in ("offset", "numel", "total")))


def _tensor_of(item: Any, where: str) -> TensorRecord:
    _need_keys(item, {"dtype", "shape"}, where)
    shape = item["shape"]
    if not isinstance(item["dtype"], str) or not isinstance(shape, list) or any(type(n) is not int for n in shape):
        raise ValueError(f"{where}: not a dtype and a list of sizes")
    return TensorRecord(item["dtype"], tuple(shape))


def _mapping(item: dict[str, Any], key: str, where: str) -> dict[str, Any]:
    value = item[key]
    if not isinstance(value, dict):
        raise ValueError(f"{where}: {key} is {type(value).__name__}, not an object")
    return value


def _need_keys(item: Any, keys: set[str], where: str) -> None:
    found = set(item) if isinstance(item, dict) else None
    if found != keys:
        raise ValueError(f"{where} has the fields {sorted(found) if found else found}, not {sorted(keys)}")


def _count(item: dict[str, Any], key: str) -> int:
    value = item[key]
    if type(value) is not int or value < 0:
        raise ValueError(f"{key} is {value!r}, not a count")
    return value


def _hex(item: dict[str, Any], key: str, digits: int, where: str) -> str:
    value = item[key]
    if not isinstance(value, str) or not re.fullmatch(f"[0-9a-f]{{{digits}}}", value):
        raise ValueError(f"{where}: {key} is {value!r}, not {digits} hexadecimal digits")
    return value
