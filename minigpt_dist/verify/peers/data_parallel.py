"""torch's DistributedDataParallel with AdamW, and with ZeroRedundancyOptimizer over it.

Owns their calling conventions. torch has no checkpoint of its own for either, so their states go through this package's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from minigpt_dist.config import TrainConfig
from minigpt_dist.runner import Pieces, State
from minigpt_dist.verify.peers.adamw import adamw_options
from minigpt_dist.worker import PLAIN


class DataParallel:
    """DDP, replicated AdamW. `settle`: does a load first run the dummy pass that `Traits.settles_on_resume` declares?"""

    @staticmethod
    def DistributedDataParallel(module: nn.Module) -> DistributedDataParallel:  # noqa: N802 - the contract's name
        """torch's wrapper, told to look for parameters without a gradient, as it has to be wherever there may be some."""
        return DistributedDataParallel(module, find_unused_parameters=True)

    def __init__(self, settle: bool) -> None:
        self.settle = settle
        self.wrapper: DistributedDataParallel | None = None

    def pieces(self) -> Pieces:
        """The worker's pieces; one object serves one run."""
        return replace(
            PLAIN, broadcast=self.wrap, optimizer=self.optimizer, save=save, load=self.load, forward=self.forward
        )

    def wrap(self, module: nn.Module) -> None:
        """Construction sends rank 0's parameters to all."""
        self.wrapper = DistributedDataParallel(module)

    def forward(self, module: nn.Module, ids: Tensor) -> Tensor:
        assert self.wrapper is not None
        return self.wrapper(ids)  # type: ignore[no-any-return]  # nn.Module call is Any

    def optimizer(self, module: nn.Module, config: TrainConfig, world_size: int, rank: int) -> Any:
        return torch.optim.AdamW(module.parameters(), **adamw_options(config))

    def load(self, folder: Path, world_size: int, rank: int) -> State:
        """The saved state, after one pass that brings the wrapper's buckets into the order they had when it was saved.

        A wrapper fills its buckets in declaration order until its first backward shows the order in which gradients become ready; from then
        on in that order. Gloo's ring adds each chunk of a bucket from another rank on, so another order means other bits.
        """
        if self.settle:
            assert self.wrapper is not None
            self.wrapper(torch.zeros(1, 1, dtype=torch.int64)).sum().backward()
            self.wrapper.zero_grad()
        state = PLAIN.load(folder, world_size, rank)
        return {**state, "optimizer": _rekeyed(state["optimizer"], int)}


def save(state: State, folder: Path, step: int, config: TrainConfig) -> object:
    """This package's sharded save, which takes no key but a string; torch numbers its optimizer's states."""
    return PLAIN.save({**state, "optimizer": _rekeyed(state["optimizer"], str)}, folder, step, config)


def _rekeyed(optimizer: State, kind: Callable[[Any], str | int]) -> State:
    return {**optimizer, "state": {kind(number): moments for number, moments in optimizer["state"].items()}}


class ShardedAdamW(ZeroRedundancyOptimizer):
    """ZeroRedundancyOptimizer whose state is its own shard: torch's would first collect everyone's on one rank, and keep it there."""

    def state_dict(self) -> dict[str, Any]:
        return dict(self.optim.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optim.load_state_dict(state_dict)
        for group, loaded in zip(self.param_groups, self.optim.param_groups, strict=True):
            group.update({option: value for option, value in loaded.items() if option != "params"})


class ZeroRedundancy(DataParallel):
    """DDP, and each parameter's AdamW state on one rank, which sends the new value to the others."""

    ZeroOptimizer = ShardedAdamW

    def optimizer(self, module: nn.Module, config: TrainConfig, world_size: int, rank: int) -> Any:
        return ShardedAdamW(module.parameters(), torch.optim.AdamW, **adamw_options(config))
