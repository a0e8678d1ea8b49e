"""ZeRO: optimizer state sharded over ranks, and in stages 2 and 3 gradients and parameters too (Rajbhandari et al. 2020, section 5).

Owns one step: the mean of gradients over ranks, AdamW on this rank's slice of the master copy, parameters from it.
Leaves what is kept and exchanged between steps to `stages/`, forward, backward and the moment of the step to the loop, and files to
`checkpoint/`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, overload

import torch
from torch import Tensor, nn

from minigpt_dist.parallel.clipping import Clipping
from minigpt_dist.parallel.collectives import Group, world
from minigpt_dist.parallel.ddp import require_same_on_all_ranks
from minigpt_dist.parallel.global_norm import GlobalNorm
from minigpt_dist.parallel.model_axis import ModelAxis
from minigpt_dist.parallel.offload import Offload
from minigpt_dist.parallel.precision import LossScaler
from minigpt_dist.parallel.stages.reducer import Reducer
from minigpt_dist.parallel.stages.shard import Shard
from minigpt_dist.parallel.stages.stage1 import Stage1
from minigpt_dist.parallel.stages.stage2 import ShardedGradients, Stage2
from minigpt_dist.parallel.stages.stage3 import Stage3
from minigpt_dist.parallel.stages.units import Units

STAGES: dict[int, type[Stage1] | type[Stage2] | type[Stage3]] = {1: Stage1, 2: Stage2, 3: Stage3}


class ZeroOptimizer(torch.optim.Optimizer):
    """AdamW whose fp32 master copy and two moments are cut over `world_size` ranks: 12*ceil(P/N) bytes a rank.

    A drop-in for torch.optim.AdamW (default weight_decay 0): parameter groups and their options, learning-rate edits and
    schedulers, closures, frozen, unused, tied and empty parameters, groups added late all behave the same, and so do the
    bits, given the same mean gradient. What differs: `step()` averages gradients over ranks first, and gradients and
    parameters live in flat buffers, so a model is moved or cast before its optimizer is built, not after.

    Stages 2 and 3 have the bits of stage 1, and its state. In both, gradients leave in backward, so `p.grad` is None after it, and
    a step uses them up. To have stage 1's bits over several micro-batches too, all but the last one's backward run in `no_sync`. In
    stage 3, parameters are whole while their module runs, and inside of `gathered`; every rank must run the same modules.

    Args:
        module: the model, or an iterable of parameters or of parameter groups, equal on all ranks.
        world_size, rank: of `group` (default: the world); must be the real ones.
        max_norm: if given, the mean gradient is scaled so that its global 2-norm is at most this (as clip_grad_norm_);
            `clipping` says what became of the last step's.
        stage: of ZeRO, 1, 2 or 3. model: for stage 3, where the parameters are used, if `module` is not that.
        bucket_mb: for stages 2 and 3, MiB of gradients a message. overlap: for these, exchange while computing; the same bits.
        offload: where else than in the parameters' memory master copy and moments live; the same bits.
        reduction: "sum", or "exact": sums on a fixed grid that depend on no order (see `exact.py`). In exact mode gradients
            are summed over micro-batches and divided by their number over all ranks at the step, so do not divide the loss.
        group: the ranks that train the same parameters on different data.
        model_axis: the ranks of one replica, where the model itself is cut: norms and overflows are theirs together.
        scaler: for float16, what the loss was multiplied by. If any rank's gradient is not finite, no rank's parameters change.

    Raises ValueError, on all ranks, before anything is exchanged: options out of range (as AdamW), wrong world size or rank,
    parameters that differ between ranks.
    """

    def __init__(
        self,
        module: nn.Module | Iterable[Any],
        world_size: int,
        rank: int,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        max_norm: float | None = None,
        reduction: str = "sum",
        group: Group = None,
        stage: int = 1,
        model: nn.Module | None = None,
        bucket_mb: float = 4.0,
        overlap: bool = True,
        offload: Offload | None = None,
        model_axis: ModelAxis | None = None,
        scaler: LossScaler | None = None,
    ) -> None:
        if (world_size, rank) != world(group):
            raise ValueError(
                f"(world_size, rank) is {(world_size, rank)}, but should be {world(group)}, as in the process group"
            )
        if reduction not in ("sum", "exact"):
            raise ValueError(f"reduction is {reduction!r}, but should be 'sum' or 'exact'")
        if max_norm is not None and not max_norm > 0:
            raise ValueError(f"max_norm is {max_norm}, but should be above 0, or None")
        if stage not in STAGES:
            raise ValueError(f"stage is {stage!r}, but should be 1, 2 or 3")
        if not bucket_mb > 0:
            raise ValueError(f"bucket_mb is {bucket_mb!r}, but should be above 0")
        model = module if model is None and isinstance(module, nn.Module) else model
        if stage == 3 and model is None:
            raise ValueError("model is None, but should be the module that uses the parameters, for stage 3")
        self.world_size, self.rank, self.group = world_size, rank, group
        self.stage, self._model = stage, model
        self._units: Units | None = None
        self._offload, self._overlap = offload, overlap
        self._reducer = Reducer(int(bucket_mb * 2**20), group, overlap) if stage > 1 else None
        self.max_norm, self.exact = max_norm, reduction == "exact"
        self.scaler = scaler
        self.micro_batches = 0
        self.last_grad_sq = 0.0
        self.clipping: Clipping | None = None  # of the last step, if there is a bound
        self._placed: set[int] = set()  # ids of the parameters that the shards hold, and so keep alive
        self._shards: list[Shard] | None = None  # None while the base class collects the groups
        params = module.parameters() if isinstance(module, nn.Module) else module
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        device = next((p.device for g in self.param_groups for p in g["params"]), torch.device("cpu"))
        self.norm = GlobalNorm(group, model_axis, device)
        self._shards = []
        self._adopt_new_parameters()

    @property
    def shards(self) -> list[Shard]:
        return [] if self._shards is None else self._shards

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch; a group added after construction gets a flat buffer of its own, on all ranks."""
        super().add_param_group(param_group)
        _check_options(self.param_groups[-1])
        if self._shards is not None:
            self._adopt_new_parameters()

    def _adopt_new_parameters(self) -> None:
        """Give every trainable parameter without a place one: in a new flat buffer for each dtype and device."""
        new = [p for g in self.param_groups for p in g["params"] if p.requires_grad and id(p) not in self._placed]
        if not new:
            return
        require_same_on_all_ranks("a parameter", [f"{tuple(p.shape)} {p.dtype}" for p in new], self.group)
        kinds = dict.fromkeys((p.dtype, p.device) for p in new)
        for kind in kinds:
            alike = [p for p in new if (p.dtype, p.device) == kind]
            self._placed.update(map(id, alike))
            self.shards.append(STAGES[self.stage](alike, self.world_size, self.rank, self.exact, self._offload))
            self._attach(self.shards[-1])

    def _attach(self, shard: Shard) -> None:
        """Let a shard of stage 2 or 3 hear of its parameters' gradients, and of their use."""
        if self._reducer is not None and isinstance(shard, ShardedGradients):
            self._reducer.add(shard)
        if isinstance(shard, Stage3) and self._model is not None:
            self._units = self._units or Units(self._model, self.group, self._overlap)
            self._units.add(shard)

    def no_sync(self) -> AbstractContextManager[None]:
        """Stages 2 and 3: backwards inside only add to this rank's own gradients, kept whole; the first one outside exchanges them all.

        In exact mode it changes nothing: sums that depend on no order are exchanged at every backward. Nor in stage 1, which exchanges
        at the step.
        """
        return nullcontext() if self._reducer is None or self.exact else self._reducer.no_sync()

    def gathered(self) -> AbstractContextManager[None]:
        """Inside, every parameter is whole, and what is written to it is kept. All ranks together. Nothing to do below stage 3."""
        return nullcontext() if self._units is None else self._units.gathered()

    def gradients(self) -> list[Tensor]:
        """What this rank holds of gradients between backward and step: its own whole ones in stage 1, its slice of their sum above."""
        params = [p for g in self.param_groups for p in g["params"]]
        sums = [t for shard in self.shards if isinstance(shard, ShardedGradients) for t in shard.gradients()]
        return sums + [p.grad for p in params if p.grad is not None]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients. They stay views of zeros whatever `set_to_none` says; `step` still skips the unused."""
        for shard in self.shards:
            shard.zero_grad()
        if self._reducer is not None:
            self._reducer.reset()
        for p in (p for g in self.param_groups for p in g["params"] if not p.requires_grad):
            p.grad = None
        self.micro_batches = 0

    def fold(self) -> None:
        """Exact mode: close one micro-batch. Call after each backward; a last one left open is closed by `step`."""
        if self.exact:
            self.micro_batches += any([shard.fold() for shard in self.shards])  # noqa: C419 - every shard must fold

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Average gradients over ranks, update this rank's slice, collect the new parameters. All ranks together."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._adopt_new_parameters()
        if self._units is not None:
            self._units.free()
        for shard in self.shards:
            shard.prepare()
        if self._reducer is not None:
            self._reducer.flush()
        self.fold()
        divisor = self.world_size * max(self.micro_batches, 1)
        grads = [shard.reduce(divisor, self.group) for shard in self.shards]
        if self._agreed_finite(grads):
            self._update(grads)
        for shard in self.shards:
            shard.gather(self.group)
        if self._reducer is not None:  # its gradients are used up
            self._reducer.reset()
            self.micro_batches = 0
        return loss

    def _agreed_finite(self, grads: list[Tensor]) -> bool:
        """Take the loss scale out of the mean gradient; is it finite on all ranks? Without a scaler, nobody asks.

        An overflow on one rank is an inf or a NaN in the sum, whose owner sees it.
        """
        if self.scaler is None:
            return True
        finite = self.norm.sum(float(not self.scaler.unscale_(grads))) == 0
        self.scaler.update(finite)
        self.last_grad_sq = self.last_grad_sq if finite else math.nan
        return finite

    def _update(self, grads: list[Tensor]) -> None:
        """AdamW on this rank's slices, after clipping."""
        self._clip(grads)
        group_of = {p: g for g in self.param_groups for p in g["params"]}
        for shard, grad in zip(self.shards, grads, strict=True):
            shard.update(grad, group_of)

    def _clip(self, grads: list[Tensor]) -> None:
        """Scale the mean gradient to `max_norm` by its norm over *all* slices, so that every rank scales alike."""
        self.last_grad_sq = self.norm.own_sq(self.shards, grads)
        if self.max_norm is None:
            return
        self.clipping = Clipping(self.norm.sum(self.last_grad_sq) ** 0.5, self.max_norm)
        for grad in grads:
            grad.mul_(self.clipping.scale)

    def state_dict(self) -> dict[str, Any]:
        """This rank's part: {"shards": [slice state, ...], "groups": [options, ...]}, and "scaler" if there is one; all copies, plain
        data and tensors."""
        groups = [{k: v for k, v in g.items() if k != "params"} for g in self.param_groups]
        scaler = {} if self.scaler is None else {"scaler": self.scaler.state_dict()}
        return {"shards": [shard.state_dict() for shard in self.shards], "groups": groups, **scaler}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` gave on the same rank of the same layout. ValueError if it is of another.

        As in torch, the parameters themselves belong to the model: load those into the model.
        """
        shards, groups = state_dict["shards"], state_dict["groups"]
        if len(shards) != len(self.shards) or len(groups) != len(self.param_groups):
            raise ValueError(
                f"state has {len(shards)} shards and {len(groups)} groups, "
                f"but should have {len(self.shards)} and {len(self.param_groups)}"
            )
        if (self.scaler is None) != ("scaler" not in state_dict):
            seen, wanted = ("no", "one") if self.scaler else ("one", "none")
            raise ValueError(f"state has {seen} loss scaler, but should have {wanted}")
        for shard, state in zip(self.shards, shards, strict=True):
            shard.load_state_dict(state)
        if self.scaler is not None:
            self.scaler.load_state_dict(state_dict["scaler"])
        for own, saved in zip(self.param_groups, groups, strict=True):
            own.update({k: tuple(v) if k == "betas" else v for k, v in saved.items()})


def _check_options(options: dict[str, Any]) -> None:
    """AdamW's own ranges; ValueError names the option."""
    for name in ("lr", "eps", "weight_decay"):
        if not options[name] >= 0.0:
            raise ValueError(f"{name} is {options[name]}, but should be >= 0")
    if not all(0.0 <= beta < 1.0 for beta in options["betas"]):
        raise ValueError(f"betas is {options['betas']}, but should be two numbers in [0, 1)")
