"""Memory by kind on every rank: what a ZeRO-1 step really holds, beside what the sizes foretell.

Owns the run and the prediction. Leaves counting to `memory.py` and `activations.py`, the table to `cli/memory.py`.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from minigpt_dist.activations import SavedBytes, layer_activations
from minigpt_dist.config import ModelConfig
from minigpt_dist.launch import run_world
from minigpt_dist.loss import next_token_loss
from minigpt_dist.memory import baseline, census, zero1_bytes
from minigpt_dist.model import MiniGPT
from minigpt_dist.parallel.collectives import world
from minigpt_dist.parallel.zero import ZeroOptimizer

KINDS = ("params", "grads", "optimizer", "activations", "buffers")


def memory_body(sizes: dict[str, Any], batch: int, micros: int, dtype: str) -> dict[str, int]:
    """On each rank: bytes by kind after two steps; of activations the most at once in the second."""
    config, (N, rank) = ModelConfig(**sizes), world()
    torch.manual_seed(0)
    model = MiniGPT(**sizes).to(getattr(torch, dtype))
    known = baseline()
    optimizer = ZeroOptimizer(model, N, rank, lr=1e-3)
    for step in range(2):
        optimizer.zero_grad()
        with SavedBytes([*model.parameters(), *model.buffers()]) as saved:
            for micro in range(micros):
                draw = torch.Generator().manual_seed((step * N + rank) * micros + micro)
                ids = torch.randint(0, config.vocab, (2, batch, config.seq_len), generator=draw)
                (next_token_loss(model(ids[0]), ids[1]) / micros).backward()
        optimizer.step()
    return {**census(model, known), "activations": saved.peak}


def measured(
    model: ModelConfig, world_size: int, batch: int, micros: int, dtype: str, deadline_s: float
) -> list[dict[str, int]]:
    """Bytes by kind of every rank, after real steps over gloo."""
    return run_world(memory_body, world_size, asdict(model), batch, micros, dtype, deadline_s=deadline_s)


def predicted(model: ModelConfig, world_size: int, batch: int, dtype: str) -> dict[str, int]:
    """Bytes by kind of a rank.

    Parameters and gradients whole, in flat memory that is padded to a multiple of N; 12 ceil(P/N) of float32 master and moments (24 of
    float64); activations of one micro-batch, since each is freed before the next. MiniGPT has no buffers. ValueError with dropout.
    """
    P, kind = model.numel(), getattr(torch, dtype)
    padded = world_size * -(-P // world_size)
    return {
        "params": padded * kind.itemsize,
        "grads": padded * kind.itemsize,
        "optimizer": zero1_bytes(P, world_size, 3 * max(kind.itemsize, 4)),
        "activations": sum(layer_activations(model, batch, kind)),
        "buffers": 0,
    }
