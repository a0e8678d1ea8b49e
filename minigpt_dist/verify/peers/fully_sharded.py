"""torch's fully_shard (FSDP2) with AdamW, saved by torch.distributed.checkpoint.

Owns their calling conventions: each block is a unit, and the rest of the model another.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard

from minigpt_dist.config import TrainConfig
from minigpt_dist.parallel.collectives import world
from minigpt_dist.parallel.ddp import broadcast_parameters
from minigpt_dist.runner import Pieces, State
from minigpt_dist.verify.peers.adamw import adamw_options
from minigpt_dist.worker import PLAIN


class FullyShard:
    """Parameters, gradients and moments cut by rows over ranks."""

    def __init__(self) -> None:
        self.model: nn.Module | None = None
        self.state: NamedState | None = None

    def pieces(self) -> Pieces:
        """The worker's pieces; one object serves one run."""
        return replace(
            PLAIN,
            broadcast=self.shard,
            optimizer=self.optimizer,
            save=self.save,
            load=self.load,
            full_parameters=full_parameters,
        )

    def shard(self, module: nn.Module) -> None:
        """Make ranks equal, then cut: fully_shard itself cuts whatever each rank has."""
        broadcast_parameters(module)
        blocks: Iterable[nn.Module] = module.get_submodule("blocks").children()
        for block in blocks:
            fully_shard(block)
        fully_shard(module)
        self.model = module

    def optimizer(self, module: nn.Module, config: TrainConfig, world_size: int, rank: int) -> Any:
        self.state = NamedState(module, config)
        return self.state

    def save(self, state: State, folder: Path, step: int, config: TrainConfig) -> object:
        return state_dict_saver.save(_keyed_by_rank(state), checkpoint_id=folder / "checkpoint")

    def load(self, folder: Path, world_size: int, rank: int) -> State:
        """torch.distributed.checkpoint reads into tensors that are there already."""
        assert self.model is not None
        assert self.state is not None
        state = {
            "step": 0,
            "model": self.model.state_dict(),
            "optimizer": self.state.blank(),
            "rng": torch.get_rng_state(),
        }
        keyed = _keyed_by_rank(state)
        state_dict_loader.load(keyed, checkpoint_id=folder / "checkpoint")
        return {**keyed, "rng": keyed[f"rng-rank{rank}"]}


class NamedState:
    """AdamW whose state has the parameters' names, as torch.distributed.checkpoint wants it."""

    def __init__(self, module: nn.Module, config: TrainConfig) -> None:
        self.module, self.adamw = module, torch.optim.AdamW(module.parameters(), **adamw_options(config))
        self.zero_grad, self.step = self.adamw.zero_grad, self.adamw.step

    def state_dict(self) -> dict[str, Any]:
        # Asked for a state that is not there yet, torch makes one by a step of its own, and that step then counts.
        return dict(get_optimizer_state_dict(self.module, self.adamw)) if self.adamw.state else {}

    def blank(self) -> dict[str, Any]:
        """Named tensors to load into; the step counts made for it are overwritten by the load."""
        return dict(get_optimizer_state_dict(self.module, self.adamw))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_optimizer_state_dict(self.module, self.adamw, state_dict)


def full_parameters(module: nn.Module) -> Iterable[tuple[str, Tensor]]:
    """Every parameter, gathered from its shards; all ranks call it together."""
    for name, p in module.named_parameters():
        yield name, p.full_tensor()  # type: ignore[attr-defined]  # fully_shard made it a DTensor


def _keyed_by_rank(state: State) -> dict[str, Any]:
    """The random stream is each rank's own; under one name only one rank's would be kept."""
    return {**{k: v for k, v in state.items() if k != "rng"}, f"rng-rank{world()[1]}": state["rng"]}
