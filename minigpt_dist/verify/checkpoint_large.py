"""Shards beyond the first blocks: tensors of more than a mebibyte, and damage deep inside them.

A checksum of a file's first 64 KiB, or a writer that stops after one buffer, is right for every small checkpoint. Owns
the large states and the damage to their files. Leaves the verdict to `checks/checkpoint_large.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from minigpt_dist.verify.checkpoint_states import State
from minigpt_dist.verify.checkpoint_store import Rows, Store

NUMEL = 300_000  # 1.2 MB of float32
LARGE_BYTES = 2**20


def large_states(world_size: int) -> list[State]:
    """One state a rank with two tensors of 1.2 MB, replicated and sharded."""
    weight = torch.randn(NUMEL, generator=torch.Generator().manual_seed(5))
    shards = [torch.randn(NUMEL, generator=torch.Generator().manual_seed(50 + rank)) for rank in range(world_size)]
    return [
        {"model_state": {"wide.weight": weight}, "optim_state": {"master": shard, "step_count": 3}, "rank": rank}
        for rank, shard in enumerate(shards)
    ]


def large(store: Store, area: Path, world_size: int) -> Rows:
    """The load of large shards: undamaged, then with one byte changed at several depths of each large file."""
    folder = area / "large"
    store.must_save((large_states(world_size), folder, 10), wait_for_disk=True)
    rows: Rows = [{"case": "large tensors", "rank": None, "loaded": store.load(folder, world_size)}]
    for file in sorted(p for p in folder.rglob("*") if p.is_file() and p.stat().st_size >= LARGE_BYTES)[:2]:
        content = file.read_bytes()
        for part in (0.1, 0.6, 0.95):
            at = int(len(content) * part)
            file.write_bytes(content[:at] + bytes([content[at] ^ 0x40]) + content[at + 1 :])
            case = f"byte {at:,} of {len(content):,} of a large file changed"
            rows.append({"case": case, "rank": None, "loaded": store.load(folder, world_size)})
        file.write_bytes(content)
    return rows


PROBES: dict[str, Callable[..., Rows]] = {"large": large}
