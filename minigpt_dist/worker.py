"""The composition root of ONE rank of this package's own stack: its pieces, and the body that launch runs.

Owns which of our pieces a run is made of. Leaves the pieces to `parallel/` and `checkpoint/`, their wiring into the loop to
`runner.py`, starting the process to `launch/`, and what the trace means to `verify/`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn

from minigpt_dist.checkpoint import load_resharded, load_sharded, save_shard
from minigpt_dist.config import ModelConfig, TrainConfig
from minigpt_dist.corpus import make_corpus, read_text
from minigpt_dist.model import MiniGPT
from minigpt_dist.parallel.collectives import Group, exchange, world
from minigpt_dist.parallel.ddp import broadcast_parameters
from minigpt_dist.parallel.mesh import Mesh
from minigpt_dist.parallel.model_axis import ModelAxis
from minigpt_dist.parallel.offload import Offload
from minigpt_dist.parallel.precision import LossScaler
from minigpt_dist.parallel.recompute import recompute_blocks
from minigpt_dist.parallel.tensor import replicated_parameters, tensor_parallel, token_loss, whole
from minigpt_dist.parallel.zero import ZeroOptimizer
from minigpt_dist.runner import Pieces, State, Worker


def _own_model(sizes: ModelConfig) -> MiniGPT:
    return MiniGPT(**{name: getattr(sizes, name) for name in sizes.__dataclass_fields__})


def _own_corpus(config: TrainConfig) -> Tensor:
    if config.text is not None:
        return read_text(config.text, config.total_tokens)
    return make_corpus(config.seed, config.total_tokens, config.model.vocab)


def _own_optimizer(
    module: nn.Module,
    config: TrainConfig,
    world_size: int,
    rank: int,
    group: Group = None,
    model_axis: ModelAxis | None = None,
    folder: Path | None = None,
) -> ZeroOptimizer:
    """ZeRO over the data-parallel ranks of `group`, with a loss scale for float16. `folder`: on whose disk offloaded state is put."""
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
        group=group,
        model_axis=model_axis,
        scaler=LossScaler(config.loss_scale) if config.dtype == "float16" else None,
        stage=config.zero_stage,
        offload=None if config.offload == "none" else Offload(config.offload, folder),
    )


def _own_save(state: State, folder: Path, step: int, config: TrainConfig) -> object:
    N, rank = world()
    meta = {"config": config.to_dict(), "data_position": step * config.dp * config.micro_batches * config.block_tokens}
    return save_shard(state, folder, step, rank=rank, world_size=N, exchange=exchange, meta=meta)


def _own_load(folder: Path, world_size: int, rank: int) -> State:
    """Load at the same world size, or cut the saved shards anew for this one."""
    states: list[State] = load_resharded(folder, world_size)
    return states[rank]


# Around any optimizer that keeps whole parameters and gradients; and around ours, which may not.
PLAIN = Pieces(_own_model, _own_corpus, broadcast_parameters, _own_optimizer, _own_save, _own_load)
OURS = replace(
    PLAIN,
    gathered=lambda optimizer: optimizer.gathered(),
    accumulating=lambda optimizer: optimizer.no_sync(),
    gradients=lambda model, optimizer: () if optimizer.scaler else optimizer.gradients(),  # overflows are the scaler's
)


def _recomputing(pieces: Pieces) -> Pieces:
    """`pieces`, whose model's blocks compute their activations again in backward."""

    def model(sizes: ModelConfig) -> nn.Module:
        return recompute_blocks(cast(MiniGPT, pieces.model(sizes)))

    return replace(pieces, model=model)


def _tensor_parallel(pieces: Pieces, config: TrainConfig, folder: Path) -> Pieces:
    """`pieces`, over replicas that `config.tp` ranks hold between them. All ranks call it together: it makes the groups."""
    mesh = Mesh(config.layout)
    data, tensor = mesh.group("dp"), mesh.group("tp")

    def model(sizes: ModelConfig) -> nn.Module:
        return tensor_parallel(_own_model(sizes), tensor, sequence_parallel=config.sequence_parallel)

    def optimizer(module: nn.Module, config: TrainConfig, world_size: int, rank: int) -> ZeroOptimizer:
        elsewhere = replicated_parameters(module) if mesh.place.tp else ()
        return _own_optimizer(module, config, config.dp, mesh.place.dp, data, ModelAxis(tensor, elsewhere), folder)

    return replace(
        pieces,
        model=model,
        broadcast=lambda module: broadcast_parameters(module, group=data),
        optimizer=optimizer,
        load=lambda folder, world_size, rank: load_sharded(folder, world_size)[rank],  # of this very layout
        loss=token_loss,
        full_parameters=whole,
    )


def pieces_of(config: TrainConfig, folder: Path) -> Pieces:
    """Our pieces for one run, whose files are in `folder`. ValueError if its layout is of another number of ranks than there are."""
    pieces = replace(OURS, optimizer=partial(_own_optimizer, folder=folder))
    pieces = pieces if config.tp == 1 else _tensor_parallel(pieces, config, folder)
    return _recomputing(pieces) if config.recompute else pieces


def rank_body(
    config: dict[str, Any], folder: str, resume: bool, watch: list[str], device: str, source: str | None = None
) -> dict[str, Any]:
    """What `launch` runs on each rank for this package's own pieces: plain data in, plain data out."""
    wanted = TrainConfig.from_dict(config)
    pieces = pieces_of(wanted, Path(folder))
    worker = Worker(wanted, Path(folder), pieces, resume, frozenset(watch), device)
    worker.source = None if source is None else Path(source)
    return worker.run()


def resized(config: TrainConfig, world_size: int) -> TrainConfig:
    """The same global batch in the same micro-batches, on another number of ranks. ValueError if it does not divide.

    A run under tensor parallelism goes on where it was: its parameters are cut by it.
    """
    if config.tp > 1:
        raise ValueError(f"world_size is {world_size}, but should be {config.world_size}, as tp is {config.tp}")
    total = config.world_size * config.micro_batches
    if total % world_size:
        possible = ", ".join(str(n) for n in range(1, total + 1) if total % n == 0)
        raise ValueError(f"world_size is {world_size}, but should be one of {possible}, which divide the {total} micro-batches of a step")
    return replace(config, world_size=world_size, micro_batches=total // world_size)


def mean(values: list[float]) -> float:
    """Arithmetic mean by exact summation, so that it does not depend on order."""
    return math.fsum(values) / len(values)
