"""States, ranks in threads, and bytes: what the checkpoint tests share."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch

from minigpt_dist.checkpoint.flat_slice import rank_slice
from minigpt_dist.checkpoint.shard_file import as_bytes


def rank_state(rank: int, world_size: int, total: int = 10, value: float = 0.5) -> dict[str, Any]:
    """A small state with everything that resharding must tell apart."""
    part = rank_slice(rank, world_size, total)
    flat = torch.arange(total, dtype=torch.float32) + value
    mine = slice(part.offset, part.offset + part.numel)
    vectors = {"master": flat[mine], "exp_avg": -flat[mine], "exp_avg_sq": flat[mine] ** 2}
    return {
        "step": 10,
        "model": {"w": torch.full((2, 3), value), "b": torch.zeros(0)},
        "optimizer": {"shards": [{**vars(part), **vectors, "steps": [3, 3]}], "groups": [{"lr": 0.1, "betas": [0.9]}]},
        "rng": torch.tensor([rank, 7], dtype=torch.uint8),
    }


def world_states(world_size: int, total: int = 10, value: float = 0.5) -> list[dict[str, Any]]:
    return [rank_state(rank, world_size, total, value) for rank in range(world_size)]


def canonical(node: Any) -> Any:
    """Equal for two states exactly if they have the same types, keys in order, and bits; tuples count as lists."""
    if isinstance(node, torch.Tensor):
        return ("tensor", node.dtype, tuple(node.shape), bytes(as_bytes(node.detach()).numpy()))
    if isinstance(node, Mapping):
        return ("mapping", [(key, canonical(value)) for key, value in node.items()])
    if isinstance(node, (list, tuple)):
        return ("list", [canonical(item) for item in node])
    if isinstance(node, float):
        return ("float", struct.pack(">d", node))
    return (type(node).__name__, node)


def on_ranks(world_size: int, body: Callable[[int, Callable[[bytes], list[bytes]]], Any]) -> list[Any]:
    """Runs `body(rank, exchange)` on threads; what each returned or raised."""
    barrier, box = threading.Barrier(world_size, timeout=20), [b""] * world_size
    out: list[Any] = [None] * world_size

    def run(rank: int) -> None:
        def exchange(mine: bytes) -> list[bytes]:
            box[rank] = mine
            barrier.wait()
            everyone = list(box)
            barrier.wait()
            return everyone

        try:
            out[rank] = body(rank, exchange)
        except Exception as error:
            out[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return out
