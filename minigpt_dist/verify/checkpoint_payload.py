"""Pickles with a payload, planted where a checkpoint's files were: does loading run them?

Owns planting one, with or without checksums that fit. The payload only makes an empty folder.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from minigpt_dist.verify.checkpoint_child import run_forked
from minigpt_dist.verify.checkpoint_damage import Files, edited, text_of, two_checkpoints
from minigpt_dist.verify.checkpoint_store import Rows, Store, put_back

HASHES = ("sha256", "sha1", "md5", "sha512", "blake2b")


class _Payload:
    """Unpickling it makes the folder `sentinel`."""

    def __init__(self, sentinel: str) -> None:
        self.sentinel = sentinel

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.sentinel,)


def payload(store: Store, area: Path, world_size: int, resigned: bool) -> Rows:
    """Load after a file was replaced by a pickle with a payload; resigned: the manifest's checksums are made to fit."""
    files, _ = two_checkpoints(store, area, world_size)
    backup = area / "backup"
    shutil.copytree(files.folder, backup, symlinks=True)
    rows: Rows = []
    documents = {path for path, _ in files.documents()}
    for path in [*files.shards.values(), *(p for p in files.others if p not in documents)]:
        raw, sentinel = path.read_bytes(), area / f"ran-{len(rows)}"
        planted = _planted(raw, str(sentinel))
        path.write_bytes(planted)
        if resigned:
            _resign(files, raw, planted)
        ended = run_forked(lambda tell: store.load(files.folder, world_size))
        rows.append(
            {
                "case": files.name(path),
                "ran": sentinel.exists(),
                "pickle": raw[:1] == b"\x80" or raw[:2] == b"PK",
                "shard": path in files.shards.values(),
                "end": ended.end,
            }
        )
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
    for path, document in files.documents():
        sized = edited(document, lambda key, value: len(new) if value == len(old) and type(value) is int else value)
        path.write_bytes(
            text_of(edited(sized, lambda key, value: swaps.get(value, value) if isinstance(value, str) else value))
        )


PROBES: dict[str, Callable[..., Rows]] = {"payload": payload}
