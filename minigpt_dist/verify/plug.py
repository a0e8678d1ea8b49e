"""From an implementation's names to the `Pieces` that a worker wires into the loop.

Owns the calling conventions of the contract: lesson-style `save_sharded(all_states, ...)` on rank 0, `load_sharded` returning a list or a
(manifest, list) pair, `MiniGPT` with or without sizes.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from minigpt_dist.config import ModelConfig, TrainConfig
from minigpt_dist.corpus import make_corpus
from minigpt_dist.parallel.collectives import barrier, world
from minigpt_dist.verify.contract import Implementation, accepted, accepts
from minigpt_dist.verify.optimizers import NotSupportedError
from minigpt_dist.worker import OURS, Pieces

SIZES = {"vocab": ("vocab", "vocab_size"), "embed_dim": ("embed_dim", "n_embd", "dim"), "num_heads": ("num_heads", "n_head"),
         "num_layers": ("num_layers", "n_layer"), "seq_len": ("seq_len", "block_size", "context_length")}


def build_model(impl: Implementation, sizes: ModelConfig) -> nn.Module:
    """The implementation's MiniGPT at `sizes`. NotSupportedError if its constructor cannot be told them."""
    build = impl.require("MiniGPT")
    options: dict[str, Any] = {}
    for ours, theirs in SIZES.items():
        name = next((n for n in theirs if accepts(build, n)), None)
        if name is not None:
            options[name] = getattr(sizes, ours)
        elif getattr(sizes, ours) != getattr(ModelConfig(), ours):
            raise NotSupportedError(f"MiniGPT takes no {ours}")
    extra = {"dropout": sizes.dropout, "tie_head": sizes.tie_head, "mlp_ratio": sizes.mlp_ratio}
    options.update(accepted(build, {k: v for k, v in extra.items() if v != getattr(ModelConfig(), k)}))
    model: nn.Module = build(**options)
    return model


def _build_optimizer(impl: Implementation, module: nn.Module, config: TrainConfig, world_size: int, rank: int) -> Any:
    build = impl.require("ZeroOptimizer")
    options: dict[str, Any] = {"lr": config.lr, "eps": config.eps, "weight_decay": config.weight_decay, "reduction": config.reduction}
    if accepts(build, "betas"):
        options["betas"] = config.betas
    else:
        options["beta1"], options["beta2"] = config.betas
    return build(module, world_size=world_size, rank=rank, **accepted(build, options))


def _save(impl: Implementation, state: dict[str, Any], folder: Path, step: int, config: TrainConfig) -> None:
    """Collect all states on rank 0 and let the implementation write them, as in the lesson."""
    N, rank = world()
    states: list[Any] | None = [None] * N if rank == 0 else None
    if N == 1:
        states = [copy.deepcopy(state)]
    else:
        dist.gather_object(state, states)
    if rank == 0:
        impl.require("save_sharded")(states, str(folder / "checkpoint"), step)
    barrier()


def _load(impl: Implementation, folder: Path, world_size: int, rank: int) -> dict[str, Any]:
    state: dict[str, Any] = states_of(impl.require("load_sharded")(str(folder / "checkpoint"), world_size))[rank]
    return state


def states_of(loaded: Any) -> list[Any]:
    """The per-rank states in what `load_sharded` returned: a list, or a pair with the manifest."""
    if isinstance(loaded, tuple):
        loaded = next((part for part in loaded if isinstance(part, (list, dict)) and not hasattr(part, "shards")), loaded)
    if isinstance(loaded, dict) and all(isinstance(k, int) for k in loaded):
        loaded = [loaded[k] for k in sorted(loaded)]
    if not isinstance(loaded, list):
        raise ValueError(f"load_sharded returned {type(loaded).__name__}, but should return a list of states, one a rank")
    return loaded


def _corpus(config: TrainConfig) -> Tensor:
    return make_corpus(config.seed, config.total_tokens, config.model.vocab)


def pieces_of(impl: Implementation) -> Pieces:
    """The worker's pieces, each from the implementation; an absent one raises MissingPieceError when it is called.

    The data is the judge's: what an implementation's own corpus gives is judged apart, and a corpus with nothing to learn
    must not decide whether the composition's loss falls.
    """
    if impl.ours:
        return OURS
    return Pieces(
        model=lambda sizes: build_model(impl, sizes),
        corpus=_corpus,
        broadcast=lambda module: impl.require("broadcast_parameters")(module),
        optimizer=lambda module, config, N, rank: _build_optimizer(impl, module, config, N, rank),
        save=lambda state, folder, step, config: _save(impl, state, folder, step, config),
        load=lambda folder, N, rank: _load(impl, folder, N, rank),
    )


def clone_bytes(tensor: Tensor) -> Tensor:
    """A copy with its own memory, whatever `tensor` is a view of."""
    return torch.empty_like(tensor).copy_(tensor)
