"""One training step of the same global batch in every layout of data, tensor and pipeline ranks, beside data ranks alone.

Owns the variants. Leaves the clock to `interleave`, the composition to `worker.py`: what is timed is what `train` runs.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minigpt_dist.batches import read_batch
from minigpt_dist.bench.comparison import Comparison
from minigpt_dist.bench.interleave import Seconds, interleaved, slowest
from minigpt_dist.bench.step import SIZES
from minigpt_dist.config import TrainConfig
from minigpt_dist.launch import run_world
from minigpt_dist.parallel.collectives import barrier, world
from minigpt_dist.parallel.mesh import coordinates_of
from minigpt_dist.worker import pieces_of

BATCH = {"tiny": 4, "medium": 2}  # sequences a micro-batch


def layouts(size: str, N: int) -> dict[str, TrainConfig]:
    """Name -> run, of 2N micro-batches a step in all. Those that the model does not fit are left out."""
    found: dict[str, TrainConfig] = {}
    plain = TrainConfig(N, steps=1, batch=BATCH[size], micro_batches=2, checkpoint_step=0, model=SIZES[size])
    for dp, tp in itertools.product(range(N, 0, -1), range(1, N + 1)):
        pp, left = divmod(N, dp * tp)
        if left:
            continue
        try:
            config = replace(plain, tp=tp, pp=pp, micro_batches=2 * N // dp)
        except ValueError:
            continue
        axes = [f"{axis} {n}" for axis, n in (("dp", dp), ("tp", tp), ("pp", pp)) if n > 1]
        found[", ".join(axes) or "one rank"] = config
    return found


def step_of(config: TrainConfig, folder: Path) -> Callable[[], None]:
    """A step of the composed run, on this rank's batches. All ranks call this together."""
    pieces, (N, rank) = pieces_of(config, folder), world()
    torch.manual_seed(0)
    model = pieces.model(config.model)
    pieces.broadcast(model)
    optimizer = pieces.optimizer(model, config, N, rank)
    corpus, replica = pieces.corpus(config), coordinates_of(config.layout, rank).dp
    pairs = [read_batch(corpus, config, 0, replica, m) for m in range(config.micro_batches)]

    def loss_of(model: torch.nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return pieces.loss(model, pieces.forward(model, x), y)

    def backward(loss: Tensor, optimizer: Any) -> None:
        (loss / config.micro_batches).backward()

    def step() -> None:
        optimizer.zero_grad()
        pieces.add_gradients(model, pairs, optimizer, loss_of, backward)
        optimizer.step()

    return step


def step_body(size: str, rounds: int, steps: int, folder: str) -> Seconds:
    """On each rank: every layout in turns."""
    actions = {name: step_of(config, Path(folder)) for name, config in layouts(size, world()[0]).items()}
    return interleaved(actions, rounds, steps, warm_up=2, before=barrier)


def compare_layouts(size: str, world_size: int, rounds: int, steps: int, deadline_s: float) -> Comparison:
    """Steps of all layouts in turns: `rounds` rounds, `steps` steps a turn; data ranks alone held against the others."""
    with tempfile.TemporaryDirectory(prefix="minigpt-dist-") as folder:
        seconds = slowest(run_world(step_body, world_size, size, rounds, steps, folder, deadline_s=deadline_s))
    tokens = 2 * world_size * BATCH[size] * SIZES[size].seq_len
    what = (
        f"{size}: P = {SIZES[size].numel():,}, {world_size} ranks, {tokens:,} tokens, {rounds} rounds of {steps} steps"
    )
    return Comparison(f"Training step by layout, ZeRO-1, {what}", seconds, next(iter(seconds)))
