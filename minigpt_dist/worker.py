"""The composition root of ONE rank of this package's own stack: its pieces, and the body that launch runs.

Owns which of our pieces a run is made of. Leaves the pieces to `parallel/` and `checkpoint/`, their wiring into the loop to
`runner.py`, starting the process to `launch/`, and what the trace means to `verify/`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from minigpt_dist.checkpoint import load_resharded, save_shard
from minigpt_dist.config import ModelConfig, TrainConfig
from minigpt_dist.corpus import make_corpus, read_text
from minigpt_dist.model import MiniGPT
from minigpt_dist.parallel.collectives import exchange, world
from minigpt_dist.parallel.ddp import broadcast_parameters
from minigpt_dist.parallel.offload import Offload
from minigpt_dist.parallel.zero import ZeroOptimizer
from minigpt_dist.runner import Pieces, State, Worker


def _own_model(sizes: ModelConfig) -> nn.Module:
    return MiniGPT(**{name: getattr(sizes, name) for name in sizes.__dataclass_fields__})


def _own_corpus(config: TrainConfig) -> Tensor:
    if config.text is not None:
        return read_text(config.text, config.total_tokens)
    return make_corpus(config.seed, config.total_tokens, config.model.vocab)


def _own_optimizer(
    module: nn.Module, config: TrainConfig, world_size: int, rank: int, folder: Path | None = None
) -> ZeroOptimizer:
    """`folder`: on whose disk offloaded state is put."""
    return ZeroOptimizer(
        module,
        world_size,
        rank,
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        weight_decay=config.weight_decay,
        max_norm=config.max_norm or None,
        reduction=config.reduction,
        stage=config.zero_stage,
        offload=None if config.offload == "none" else Offload(config.offload, folder),
    )


def _own_save(state: State, folder: Path, step: int, config: TrainConfig) -> object:
    N, rank = world()
    meta = {"config": config.to_dict(), "data_position": step * N * config.micro_batches * config.block_tokens}
    return save_shard(state, folder, step, rank=rank, world_size=N, exchange=exchange, meta=meta)


def _own_load(folder: Path, world_size: int, rank: int) -> State:
    """Load at the same world size, or cut the saved shards anew for this one."""
    states: list[State] = load_resharded(folder, world_size)
    return states[rank]


OURS = Pieces(
    _own_model,
    _own_corpus,
    broadcast_parameters,
    _own_optimizer,
    _own_save,
    _own_load,
    gathered=lambda optimizer: optimizer.gathered(),
    accumulating=lambda optimizer: optimizer.no_sync(),
    gradients=lambda model, optimizer: optimizer.gradients(),
)


def rank_body(
    config: dict[str, Any], folder: str, resume: bool, watch: list[str], device: str, source: str | None = None
) -> dict[str, Any]:
    """What `launch` runs on each rank for this package's own pieces: plain data in, plain data out."""
    pieces = replace(OURS, optimizer=partial(_own_optimizer, folder=Path(folder)))
    worker = Worker(TrainConfig.from_dict(config), Path(folder), pieces, resume, frozenset(watch), device)
    worker.source = None if source is None else Path(source)
    return worker.run()


def resized(config: TrainConfig, world_size: int) -> TrainConfig:
    """The same global batch in the same micro-batches, on another number of ranks. ValueError if it does not divide."""
    total = config.world_size * config.micro_batches
    if total % world_size:
        raise ValueError(f"world_size is {world_size}, but should divide the {total} micro-batches of a step")
    return replace(config, world_size=world_size, micro_batches=total // world_size)


def mean(values: list[float]) -> float:
    """Arithmetic mean by exact summation, so that it does not depend on order."""
    return math.fsum(values) / len(values)
