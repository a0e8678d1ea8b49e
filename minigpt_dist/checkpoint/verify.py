"""Is a checkpoint good? Without parsing or loading anything.

Owns the two depths of checking. Leaves what is checked to `folder`, `digest` and `shard_file`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from minigpt_dist.checkpoint.folder import open_checkpoint
from minigpt_dist.checkpoint.manifest import Manifest
from minigpt_dist.checkpoint.shard_file import check_sampled, read_verified

__all__ = ["Mode", "verify_checkpoint"]

Mode = Literal["fast", "full"]


def verify_checkpoint(folder: Path | str, mode: Mode = "fast") -> Manifest:
    """Checks a checkpoint's folder, or a folder of checkpoints' latest, and returns its manifest.

    Args:
        mode: "fast" reads at most 4 MiB a shard: the manifest, every size, and crc32 of sampled bytes, which are all of
            a small file. "full" reads every byte and compares sha256, as every load does.

    Raises:
        ValueError: another mode.
        CheckpointError: one line naming file, expected and found.
    """
    if mode not in ("fast", "full"):
        raise ValueError(f"mode is {mode!r}, but should be 'fast' or 'full'")
    with open_checkpoint(folder) as (found, manifest):
        for record in manifest.shards:
            if mode == "fast":
                check_sampled(found / record.file, record)
            else:
                read_verified(found / record.file, record)
    return manifest
