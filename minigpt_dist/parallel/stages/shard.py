"""A shard: this rank's slice of the optimizer's state over one flat vector, and AdamW on it.

Owns master copy, moments and counts of updates. Leaves where the gradient comes from and where parameters go to the stages.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from minigpt_dist.parallel.collectives import Group
from minigpt_dist.parallel.flat import FlatLayout
from minigpt_dist.parallel.offload import Offload, OffloadedState, ResidentState

STATE_NAMES = ("master", "exp_avg", "exp_avg_sq")


class Shard(ABC):
    """Elements [lo, hi) of a flat vector: 12 bytes of optimizer state each, for float32 parameters.

    `steps[i]` counts the updates of parameter i; it is kept by the ranks that own a part of it, and 0 elsewhere.

    Args:
        flat: where parameters lie in the vector. master: this rank's slice of it, which the shard may keep.
        offload: where else than in the parameters' memory the state is to live.
    """

    def __init__(self, flat: FlatLayout, rank: int, master: Tensor, offload: Offload | None = None) -> None:
        self.flat = flat
        self.lo, self.hi = flat.bounds[rank], flat.bounds[rank + 1]
        self.state = ResidentState(master) if offload is None else OffloadedState(master, offload)
        self.master, self.exp_avg, self.exp_avg_sq = self.state.master, self.state.exp_avg, self.state.exp_avg_sq
        self.steps = [0] * len(flat.params)
        self.owned = list(flat.pieces(self.lo, self.hi))
        self._skipped = [False] * len(self.owned)

    @abstractmethod
    def prepare(self) -> None:
        """Before a step's exchange: refuse parameters whose memory was replaced, and take in weights that were loaded."""

    @abstractmethod
    def fold(self) -> bool:
        """Exact mode: close one micro-batch. False if it brought no gradient."""

    @abstractmethod
    def summed(self, group: Group) -> tuple[Tensor, Sequence[bool]]:
        """This rank's slice of the gradient's sum over ranks, -0.0 over parameters no rank has used; and per parameter, has this rank?

        The slice is the caller's to change.
        """

    @abstractmethod
    def gather(self, group: Group) -> None:
        """After the update: let parameters be what the masters say, as far as they are kept whole."""

    @abstractmethod
    def zero_grad(self) -> None:
        """Forget all gradients."""

    def reduce(self, divisor: int, group: Group) -> Tensor:
        """The mean gradient of this rank's slice, in the master's dtype; notes which parameters no rank has used."""
        total, used_here = self.summed(group)
        self._skipped = self._unused_everywhere(total, used_here)
        return total.div_(divisor).to(self.master.dtype)

    def _unused_everywhere(self, total: Tensor, used_here: Sequence[bool]) -> list[bool]:
        """Per owned piece: has no rank a gradient of its parameter? The sum says so, where this rank does not know better."""
        if all(used_here):
            return [False] * len(self.owned)
        firsts = total[[start for _, start, _ in self.owned]]
        return (torch.signbit(firsts) & (firsts == 0)).tolist()

    def update(self, grad: Tensor, group_of: dict[nn.Parameter, dict[str, Any]]) -> None:
        """AdamW over the slice: one call for each run of neighbours with equal options and equal step count."""
        runs: list[tuple[int, int, int, dict[str, Any]]] = []  # start, stop, step, options
        for (i, start, stop), skip in zip(self.owned, self._skipped, strict=True):
            if skip:
                continue
            self.steps[i] += 1
            options = group_of[self.flat.params[i]]
            if runs and runs[-1][1] == start and runs[-1][2] == self.steps[i] and runs[-1][3] is options:
                runs[-1] = (runs[-1][0], stop, self.steps[i], options)
            else:
                runs.append((start, stop, self.steps[i], options))
        for start, stop, step, options in runs:
            used = {name: options[name] for name in ("lr", "betas", "eps", "weight_decay")}
            self.state.adamw_(start, stop, grad[start:stop], step, **used)

    def adopt(self, current: Tensor, start: int = 0) -> None:
        """Take elements of the parameters, from slice element `start` on, into the master where they are not what it was cast to.

        That is what weights look like that were loaded into the model.
        """
        for lo, hi in self.state.pieces(start, start + current.numel()):
            master, now = self.master[lo:hi].to(current.device), current[lo - start : hi - start]
            expected = master.to(now.dtype)
            if not torch.equal(now, expected):
                self.master[lo:hi].copy_(torch.where(now == expected, master, now.to(master.dtype)))

    def cast_into(self, target: Tensor, start: int = 0) -> None:
        """Write the master's elements from slice element `start` on into `target`, in its dtype."""
        for lo, hi in self.state.pieces(start, start + target.numel()):
            target[lo - start : hi - start].copy_(self.master[lo:hi])

    def state_dict(self) -> dict[str, Any]:
        """Copies of the slice without its padding; `offset`, `numel` and `total` say which elements of how many."""
        numel = max(min(self.hi, self.flat.total) - self.lo, 0)
        tensors = {name: self.state.copy(name, numel) for name in STATE_NAMES}
        return {
            "offset": min(self.lo, self.flat.total),
            "numel": numel,
            "total": self.flat.total,
            **tensors,
            "steps": [*self.steps],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`; ValueError, before anything is changed, for another slice's."""
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
        for lo, hi in self.state.pieces(0, own["numel"]):
            for name in STATE_NAMES:
                getattr(self, name)[lo:hi].copy_(state[name][lo:hi])
        mine = {i for i, _, _ in self.owned}  # a state cut anew for this rank brings everyone's counts
        self.steps = [int(s) if i in mine else 0 for i, s in enumerate(state["steps"])]


def master_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of the master copy and the moments: float32, but for float64 parameters."""
    return torch.float64 if dtype == torch.float64 else torch.float32
