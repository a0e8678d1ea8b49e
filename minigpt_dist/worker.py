"""The composition root of ONE rank of this package's own stack: its pieces, and the body that launch runs.

Owns which of our pieces a run is made of. Leaves the pieces to `parallel/` and `checkpoint/`, their wiring into the loop to
`runner.py`, starting the process to `launch/`, and what the trace means to `verify/`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from minigpt_dist.checkpoint import load_at_layout, load_resharded, save_shard
from minigpt_dist.config import ModelConfig, TrainConfig
from minigpt_dist.corpus import make_corpus, read_text
from minigpt_dist.layout import CHUNKS
from minigpt_dist.model import MiniGPT
from minigpt_dist.parallel.collectives import Group, exchange, world
from minigpt_dist.parallel.ddp import broadcast_parameters
from minigpt_dist.parallel.mesh import Mesh
from minigpt_dist.parallel.model_axis import ModelAxis
from minigpt_dist.parallel.offload import Offload
from minigpt_dist.parallel.parts import parts_of
from minigpt_dist.parallel.pipeline.schedule import pipeline_schedule
from minigpt_dist.parallel.pipeline.staged import Pair, StagedGPT
from minigpt_dist.parallel.precision import LossScaler
from minigpt_dist.parallel.recompute import recompute_blocks
from minigpt_dist.parallel.tensor import replicated_parameters, tensor_parallel, token_loss, whole
from minigpt_dist.parallel.zero import ZeroOptimizer
from minigpt_dist.parts import Parts
from minigpt_dist.planner.shape import ModelShape
from minigpt_dist.planner.stages import layer_cuts
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
        overlap=config.overlap,
        offload=None if config.offload == "none" else Offload(config.offload, folder),
    )


def _own_save(state: State, folder: Path, step: int, config: TrainConfig) -> object:
    N, rank = world()
    meta = {"config": config.to_dict(), "data_position": step * config.dp * config.micro_batches * config.block_tokens}
    return save_shard(state, folder, step, rank=rank, world_size=N, exchange=exchange, meta=meta)


def _own_load(folder: Path, world_size: int, rank: int, parts: Parts | None = None) -> State:
    """This rank's state from a checkpoint of any layout; of any world size, for an optimizer that says nothing of parts."""
    if parts is not None:
        return load_at_layout(folder, parts, rank, world_size)
    states: list[State] = load_resharded(folder, world_size)
    return states[rank]


# Around any optimizer that keeps whole parameters and gradients; and around ours, which may not.
PLAIN = Pieces(_own_model, _own_corpus, broadcast_parameters, _own_optimizer, _own_save, _own_load)
OURS = replace(
    PLAIN,
    gathered=lambda optimizer: optimizer.gathered(),
    accumulating=lambda optimizer: optimizer.no_sync(),
    parts=parts_of,
    gradients=lambda model, optimizer: () if optimizer.scaler else optimizer.gradients(),  # overflows are the scaler's
)


def _cut_model(sizes: ModelConfig, config: TrainConfig, mesh: Mesh) -> MiniGPT | StagedGPT:
    """This rank's part of the model that the first rank of its replica has made."""
    tensor, stages = mesh.group("tp"), mesh.group("pp")
    model = _own_model(sizes)
    if config.pp > 1:
        broadcast_parameters(model, group=stages)
    if config.tp > 1:
        tensor_parallel(model, tensor, sequence_parallel=config.sequence_parallel)
    if config.recompute:
        recompute_blocks(model)
    if config.pp == 1:
        return model
    schedule = pipeline_schedule(config.schedule, config.pp, config.micro_batches, CHUNKS[config.schedule])
    cuts = layer_cuts(ModelShape(sizes), config.layout)
    parts = config.tp if config.sequence_parallel else 1
    return StagedGPT(model, cuts, schedule, _loss_of(config), stages, sequence_parts=parts, overlap=config.overlap)


def _loss_of(config: TrainConfig) -> Callable[[nn.Module, Tensor, Tensor], Tensor]:
    return token_loss if config.tp > 1 else PLAIN.loss


def _whole_parameters(
    model: nn.Module, config: TrainConfig, shapes: Sequence[tuple[str, Tensor]]
) -> Iterable[tuple[str, Tensor]]:
    """All parameters of the model by name, whole, on every rank of a replica; they call it together."""
    own = whole(model) if config.tp > 1 else ((name, p.detach()) for name, p in model.named_parameters())
    return model.joined(own, shapes) if isinstance(model, StagedGPT) else own


def _cut_pieces(pieces: Pieces, config: TrainConfig, folder: Path) -> Pieces:
    """`pieces`, over replicas that tp * pp ranks hold between them. All ranks call it together: it makes the groups."""
    mesh = Mesh(config.layout)
    data, replica = mesh.group("dp"), mesh.group("pp", "tp")
    with torch.device("meta"):
        shapes = list(_own_model(config.model).named_parameters())

    def optimizer(module: nn.Module, config: TrainConfig, world_size: int, rank: int) -> ZeroOptimizer:
        elsewhere = replicated_parameters(module) if mesh.place.tp else []
        elsewhere += module.copies if isinstance(module, StagedGPT) else []
        return _own_optimizer(module, config, config.dp, mesh.place.dp, data, ModelAxis(replica, elsewhere), folder)

    def pipelined(model: StagedGPT, batches: Iterable[Pair], optimizer: ZeroOptimizer, *_: object) -> list[float]:
        return model.add_gradients(batches, optimizer.scaler.scaled if optimizer.scaler else lambda loss: loss)

    return replace(
        pieces,
        model=lambda sizes: _cut_model(sizes, config, mesh),
        broadcast=lambda module: broadcast_parameters(module, group=data),
        optimizer=optimizer,
        parts=lambda model, optimizer: parts_of(model, optimizer, model.tied if isinstance(model, StagedGPT) else None),
        loss=_loss_of(config),
        full_parameters=lambda model: _whole_parameters(model, config, shapes),
        add_gradients=pipelined if config.pp > 1 else pieces.add_gradients,
    )


def pieces_of(config: TrainConfig, folder: Path) -> Pieces:
    """Our pieces for one run, whose files are in `folder`. ValueError if its layout is of another number of ranks than there are."""
    pieces = replace(OURS, optimizer=partial(_own_optimizer, folder=folder))
    if config.tp * config.pp > 1:
        return _cut_pieces(pieces, config, folder)
    if config.recompute:
        return replace(pieces, model=lambda sizes: recompute_blocks(_own_model(sizes)))
    return pieces


def rank_body(
    config: dict[str, Any], folder: str, resume: bool, watch: list[str], device: str, source: str | None = None
) -> dict[str, Any]:
    """What `launch` runs on each rank for this package's own pieces: plain data in, plain data out."""
    wanted = TrainConfig.from_dict(config)
    pieces = pieces_of(wanted, Path(folder))
    worker = Worker(wanted, Path(folder), pieces, resume, frozenset(watch), device)
    worker.source = None if source is None else Path(source)
    return worker.run()


def resized(config: TrainConfig, world_size: int, **layout: Any) -> TrainConfig:
    """The same global batch in the same micro-batches, on another number of ranks.

    layout: fields of the configuration that change with it, such as tp and pp; the others stay.

    ValueError if the replicas do not divide the batch, or for a layout that cannot be.
    """
    total, replica = config.dp * config.micro_batches, layout.get("tp", config.tp) * layout.get("pp", config.pp)
    replicas, rest = divmod(world_size, replica) if min(world_size, replica) > 0 else (1, 0)
    if replicas and not rest and total % replicas:
        counted = "world_size" if replica == 1 else "number of replicas"
        raise ValueError(f"{counted} is {replicas}, but should divide the {total} micro-batches of a step")
    return replace(config, world_size=world_size, micro_batches=total // max(replicas, 1), **layout)


def mean(values: list[float]) -> float:
    """Arithmetic mean by exact summation, so that it does not depend on order."""
    return math.fsum(values) / len(values)
