"""DeepSpeed's ZeRO stages 1, 2 and 3 on CPU, with its own checkpoint.

Owns its calling convention: one engine that wraps model and optimizer. Stage 3 replaces torch.nn.functional.linear in its process, and an
engine keeps what it hooked: each run needs processes of its own.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from minigpt_dist.config import TrainConfig
from minigpt_dist.runner import Pieces, State
from minigpt_dist.verify.peers.adamw import adamw_options
from minigpt_dist.worker import PLAIN

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read as the package is imported

deepspeed: Any = importlib.import_module("deepspeed")  # by name, so that types can be checked where it is not installed

# Its shared-memory all-reduce serves inference only, and is compiled on first use: without it no compiler is needed.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


class ZeroStage:
    """An engine of the given stage over torch.optim.AdamW."""

    def __init__(self, stage: int) -> None:
        self.stage = stage
        self.engine: Any = None

    def pieces(self) -> Pieces:
        """The worker's pieces; one object serves one run."""
        return replace(
            PLAIN,
            broadcast=lambda module: None,  # initialize sends rank 0's parameters to all
            optimizer=self.optimizer,
            save=self.save,
            load=self.load,
            forward=lambda module, ids: self.engine(ids),
            full_parameters=self.full_parameters,
        )

    def optimizer(self, module: nn.Module, config: TrainConfig, world_size: int, rank: int) -> Any:
        """ValueError for more than one micro-batch a step: the engine would divide once more."""
        if config.micro_batches != 1:
            raise ValueError(f"micro_batches is {config.micro_batches}, but should be 1 under DeepSpeed's engine")
        adamw = torch.optim.AdamW(module.parameters(), **adamw_options(config))
        self.engine, *_ = deepspeed.initialize(
            model=module, optimizer=adamw, config=_settings(self.stage, config), dist_init_required=False
        )
        return EngineState(self.engine)

    def save(self, state: State, folder: Path, step: int, config: TrainConfig) -> object:
        return self.engine.save_checkpoint(str(folder / "checkpoint"), tag=f"step-{step}")

    def load(self, folder: Path, world_size: int, rank: int) -> State:
        """The engine loads model and optimizer itself, from pickles that this very run has written; what is returned is what it has."""
        self.engine.load_checkpoint(str(folder / "checkpoint"))
        return {"step": self.engine.global_steps, "model": self.engine.module.state_dict(), "optimizer": {}}

    def full_parameters(self, module: nn.Module) -> Iterable[tuple[str, Tensor]]:
        """Every parameter; stage 3 gathers each from its shards, all ranks together."""
        for name, p in module.named_parameters():
            if self.stage < 3:
                yield name, p
            else:
                with deepspeed.zero.GatheredParameters(p):
                    whole = p.detach().clone()
                yield name, whole


class EngineState:
    """The engine as the loop's optimizer. Its state is AdamW's over the fp32 slice, and that slice."""

    def __init__(self, engine: Any) -> None:
        self.engine, zero = engine, engine.optimizer
        self.adamw = zero.optimizer
        self.masters: list[Tensor] = (
            getattr(zero, "fp32_partitioned_groups_flat", None) or zero.single_partition_of_fp32_groups
        )

    def zero_grad(self) -> None:
        self.engine.zero_grad()

    def step(self) -> None:
        self.engine.step()

    def state_dict(self) -> dict[str, Any]:
        options = [{k: v for k, v in group.items() if k != "params"} for group in self.adamw.param_groups]
        return {
            "master": [m.data for m in self.masters],
            "moments": [self.adamw.state.get(m, {}) for m in self.masters],
            "options": options,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing is left to do: the engine's own load has put the state in place."""


def _settings(stage: int, config: TrainConfig) -> dict[str, Any]:
    """One bucket for all gradients, no parameter kept whole for being small, and torch's AdamW let alone."""
    numel = config.model.numel()
    return {
        "train_micro_batch_size_per_gpu": config.batch,
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": 2 * numel,
            "stage3_param_persistence_threshold": 0,
            "overlap_comm": False,
        },
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
