"""How the lesson's load_sharded reads a folder: its manifest, and the verified bytes of a shard. Faults replace a part of it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any


def manifest_of(src: str, expected_world_size: int | None) -> dict[str, Any]:
    """The manifest; RuntimeError if it is of another world size than expected (None: any)."""
    manifest: dict[str, Any] = json.loads((Path(src) / "manifest.json").read_text())
    if expected_world_size is not None and len(manifest["shards"]) != manifest["world_size"]:
        raise RuntimeError(f"{len(manifest['shards'])} shards")
    if expected_world_size is not None and manifest["world_size"] != expected_world_size:
        raise RuntimeError(f"world size {manifest['world_size']}")
    return manifest


def verified(src: str, shard: dict[str, Any]) -> bytes:
    """The bytes of one shard; RuntimeError if they are not what the manifest says."""
    raw: bytes = (Path(src) / shard["path"]).read_bytes()
    if len(raw) != shard["bytes"] or hashlib.sha256(raw).hexdigest() != shard["sha256"]:
        raise RuntimeError(f"{shard['path']} is damaged")
    return raw
