"""A manifest made to say something else, with a checksum that fits: what only a check of each field can notice."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from minigpt_dist.checkpoint.manifest import MANIFEST_NAME

SHARD = "rank-00001-of-00002.safetensors"
STEP = "step-00000010"


def forge(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes the manifest as `change` says, makes its checksum fit again, and lets nothing point to it."""
    document = json.loads((folder / MANIFEST_NAME).read_text())
    change(document)
    del document["checksum"]
    text = json.dumps(document, sort_keys=True, indent=2) + "\n"
    document["checksum"] = hashlib.sha256(text.encode()).hexdigest()
    (folder / MANIFEST_NAME).write_text(json.dumps(document, sort_keys=True, indent=2) + "\n")


def shard(key: str, value: Any) -> Callable[[dict[str, Any]], object]:
    return lambda document: document["shards"][1].update({key: value})
