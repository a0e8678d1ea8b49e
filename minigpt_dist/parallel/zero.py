"""ZeRO stage 1: optimizer state sharded over ranks (Rajbhandari et al. 2020, section 5.1).

Owns one step: reduce-scatter of gradients (mean), AdamW on this rank's slice of the master copy, all-gather of parameters.
Leaves forward, backward and the moment of the step to the loop, and files to `checkpoint/`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, overload

import torch
from torch import Tensor, nn

from minigpt_dist.parallel.adam import adamw_
from minigpt_dist.parallel.collectives import Group, all_gather_slices, all_reduce_sum, reduce_scatter_sum, world
from minigpt_dist.parallel.ddp import require_same_on_all_ranks
from minigpt_dist.parallel.exact import snap
from minigpt_dist.parallel.flat import FlatBuffer
from minigpt_dist.parallel.model_axis import ModelAxis
from minigpt_dist.parallel.precision import LossScaler

STATE_NAMES = ("master", "exp_avg", "exp_avg_sq")


class _Shard:
    """One flat buffer and this rank's slice of its optimizer state: 12 bytes an element for float32 parameters.

    `steps[i]` counts the updates of parameter i; it is kept by the ranks that own a part of it, and 0 elsewhere.
    """

    def __init__(self, params: list[nn.Parameter], world_size: int, rank: int, exact: bool) -> None:
        self.flat = FlatBuffer(params, world_size)
        self.lo, self.hi = self.flat.bounds[rank], self.flat.bounds[rank + 1]
        master_dtype = torch.float64 if self.flat.data.dtype == torch.float64 else torch.float32
        self.master = self.flat.data[self.lo : self.hi].to(master_dtype, copy=True)
        self.exp_avg = torch.zeros_like(self.master)
        self.exp_avg_sq = torch.zeros_like(self.master)
        self.steps = [0] * len(params)
        self.accumulator = torch.zeros(self.flat.padded, dtype=torch.float64) if exact else None
        self.folded = [False] * len(params)
        self.owned = list(self._owned())

    def _owned(self) -> Iterator[tuple[int, int, int]]:
        """(parameter index, start, stop) of every non-empty piece of a parameter in the slice, in slice coordinates."""
        for i, (offset, numel) in enumerate(zip(self.flat.offsets, self.flat.numels, strict=True)):
            start, stop = max(offset, self.lo), min(offset + numel, self.hi)
            if start < stop:
                yield i, start - self.lo, stop - self.lo

    def fold(self) -> bool:
        """Exact mode: add the micro-batch in the gradient buffer to the accumulator. False if there was nothing."""
        assert self.accumulator is not None
        present = self.flat.present()
        if not any(present):
            return False
        self.flat.collect()
        self.accumulator += snap(self.flat.grad)
        self.flat.zero_grad()
        self.folded = [a or b for a, b in zip(self.folded, present, strict=True)]
        return True

    def _used_here(self) -> list[bool]:
        """Per parameter: has this rank a gradient of it?"""
        return self.flat.present() if self.accumulator is None else self.folded

    def _unused_everywhere(self, grad: Tensor) -> list[bool]:
        """Per owned piece: has no rank a gradient of its parameter? `grad` says so, where this rank does not know better."""
        if all(self._used_here()):
            return [False] * len(self.owned)
        firsts = grad[[start for _, start, _ in self.owned]]
        return (torch.signbit(firsts) & (firsts == 0)).tolist()

    def reduce(self, divisor: int, group: Group) -> Tensor:
        """The mean gradient of this rank's slice, in the master's dtype; -0.0 over parameters no rank has used.

        From here to `gather` the parameters are only in their owners' master copies: their own memory receives what other
        ranks send, so that a step needs no third buffer of the model's size.
        """
        used = self._used_here()
        if self.accumulator is not None:
            source = self.accumulator
        else:
            self.flat.collect()
            source = self.flat.grad.to(self.master.dtype)
        self.flat.mark_absent(source, used, -0.0)
        inbox = self.flat.data if self.flat.data.dtype == source.dtype else None
        total = reduce_scatter_sum(source, self.flat.bounds, group, inbox)
        self.flat.mark_absent(source, used, 0.0)  # a later backward without zero_grad adds to zeros again
        return total.div_(divisor).to(self.master.dtype)

    def adopt_loaded_parameters(self) -> None:
        """If the model's weights were overwritten since the last step (a loaded file), take them into the master copy."""
        current = self.flat.data[self.lo : self.hi]
        expected = self.master.to(current.dtype)
        if not torch.equal(current, expected):
            self.master = torch.where(current == expected, self.master, current.to(self.master.dtype))

    def update(self, grad: Tensor, group_of: dict[nn.Parameter, dict[str, Any]]) -> None:
        """AdamW over the slice: one call for each run of neighbours with equal options and equal step count."""
        runs: list[tuple[int, int, int, dict[str, Any]]] = []  # start, stop, step, options
        for (i, start, stop), skip in zip(self.owned, self._unused_everywhere(grad), strict=True):
            if skip:
                continue
            self.steps[i] += 1
            options = group_of[self.flat.params[i]]
            if runs and runs[-1][1] == start and runs[-1][2] == self.steps[i] and runs[-1][3] is options:
                runs[-1] = (runs[-1][0], stop, self.steps[i], options)
            else:
                runs.append((start, stop, self.steps[i], options))
        for start, stop, step, options in runs:
            master, exp_avg, exp_avg_sq, g = (t[start:stop] for t in (self.master, self.exp_avg, self.exp_avg_sq, grad))
            adamw_(
                master, exp_avg, exp_avg_sq, g, step, **{k: options[k] for k in ("lr", "betas", "eps", "weight_decay")}
            )

    def gather(self, group: Group) -> None:
        """Cast the updated slice into the parameters and collect everyone's."""
        self.flat.data[self.lo : self.hi].copy_(self.master)
        all_gather_slices(self.flat.data, self.flat.bounds, group)

    def zero_grad(self) -> None:
        self.flat.zero_grad()
        if self.accumulator is not None:
            self.accumulator.zero_()
            self.folded = [False] * len(self.folded)

    def state_dict(self) -> dict[str, Any]:
        """Copies of the slice without its padding; `offset`, `numel` and `total` say which elements of how many."""
        numel = max(min(self.hi, self.flat.total) - self.lo, 0)
        tensors = {name: getattr(self, name)[:numel].clone() for name in STATE_NAMES}
        return {
            "offset": min(self.lo, self.flat.total),
            "numel": numel,
            "total": self.flat.total,
            **tensors,
            "steps": [*self.steps],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        own = self.state_dict()
        for key in ("offset", "numel", "total"):
            if state.get(key) != own[key]:
                raise ValueError(f"{key} of the optimizer's shard is {state.get(key)}, but should be {own[key]}")
        for name in STATE_NAMES:
            if not isinstance(state.get(name), Tensor) or state[name].shape != own[name].shape:
                raise ValueError(f"{name} of the optimizer's shard is not a tensor of {own['numel']} elements")
        if len(state["steps"]) != len(self.steps):
            raise ValueError(
                f"steps of the optimizer's shard has {len(state['steps'])} entries, but should have {len(self.steps)}"
            )
        for name in STATE_NAMES:
            getattr(self, name)[: own["numel"]].copy_(state[name])
        mine = {i for i, _, _ in self.owned}  # a state cut anew for this rank brings everyone's counts
        self.steps = [int(s) if i in mine else 0 for i, s in enumerate(state["steps"])]


class ZeroOptimizer(torch.optim.Optimizer):
    """AdamW whose fp32 master copy and two moments are cut over `world_size` ranks: 12*ceil(P/N) bytes a rank.

    A drop-in for torch.optim.AdamW (default weight_decay 0): parameter groups and their options, learning-rate edits and
    schedulers, closures, frozen, unused, tied and empty parameters, groups added late all behave the same, and so do the
    bits, given the same mean gradient. What differs: `step()` averages gradients over ranks first, and gradients and
    parameters live in flat buffers, so a model is moved or cast before its optimizer is built, not after.

    Args:
        module: the model, or an iterable of parameters or of parameter groups, equal on all ranks.
        world_size, rank: of `group` (default: the world); must be the real ones.
        max_norm: if given, the mean gradient is scaled so that its global 2-norm is at most this (as clip_grad_norm_).
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
        self.world_size, self.rank, self.group = world_size, rank, group
        self.max_norm, self.exact = max_norm, reduction == "exact"
        self.model_axis, self.scaler = model_axis, scaler
        self.micro_batches = 0
        self.last_grad_sq = 0.0
        self._placed: set[int] = set()  # ids of the parameters that the shards hold, and so keep alive
        self._shards: list[_Shard] | None = None  # None while the base class collects the groups
        params = module.parameters() if isinstance(module, nn.Module) else module
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._shards = []
        self._adopt_new_parameters()

    @property
    def shards(self) -> list[_Shard]:
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
            self.shards.append(_Shard(alike, self.world_size, self.rank, self.exact))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients. They stay views of zeros whatever `set_to_none` says; `step` still skips the unused."""
        for shard in self.shards:
            shard.zero_grad()
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
        for shard in self.shards:
            shard.flat.check_views()
            shard.adopt_loaded_parameters()
        self.fold()
        divisor = self.world_size * max(self.micro_batches, 1)
        grads = [shard.reduce(divisor, self.group) for shard in self.shards]
        if self._agreed_finite(grads):
            self._clip(grads)
            group_of = {p: g for g in self.param_groups for p in g["params"]}
            for shard, grad in zip(self.shards, grads, strict=True):
                shard.update(grad, group_of)
        for shard in self.shards:
            shard.gather(self.group)
        return loss

    def _agreed_finite(self, grads: list[Tensor]) -> bool:
        """Take the loss scale out of the mean gradient; is it finite on all ranks? Without a scaler, nobody asks.

        An overflow on one rank is an inf or a NaN in the sum, whose owner sees it.
        """
        if self.scaler is None:
            return True
        bad = torch.tensor(float(not self.scaler.unscale_(grads)), dtype=torch.float64)
        finite = float(self._sum_over_all(bad)) == 0
        self.scaler.update(finite)
        self.last_grad_sq = self.last_grad_sq if finite else math.nan
        return finite

    def _sum_over_all(self, value: Tensor) -> Tensor:
        """`value` summed over the data ranks, and over those of the replica if there are several."""
        value = all_reduce_sum(value, self.group)
        return value if self.model_axis is None else self.model_axis.sum(value)

    def _clip(self, grads: list[Tensor]) -> None:
        """Scale the mean gradient to `max_norm` by its norm over *all* slices, so that every rank scales alike."""
        self.last_grad_sq = sum(
            float(torch.linalg.vector_norm(part, dtype=torch.float64)) ** 2
            for shard, grad in zip(self.shards, grads, strict=True)
            for part in self._counted(shard, grad)
        )
        if self.max_norm is None:
            return
        total = float(self._sum_over_all(torch.tensor(self.last_grad_sq, dtype=torch.float64)).sqrt())
        scale = min(self.max_norm / (total + 1e-6), 1.0)
        for grad in grads:
            grad.mul_(scale)

    def _counted(self, shard: _Shard, grad: Tensor) -> list[Tensor]:
        """The parts of a slice's gradient that count in the norm here: all of it, but for what another rank of the replica counts."""
        if self.model_axis is None:
            return [grad]
        return [grad[lo:hi] for i, lo, hi in shard.owned if self.model_axis.counts(shard.flat.params[i])]

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
