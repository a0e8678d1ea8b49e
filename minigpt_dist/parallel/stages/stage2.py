"""ZeRO stage 2: every rank keeps all parameters, but of the gradients only the mean over its own slice.

Owns that slice's sum. Leaves the exchange to `reducer.py` (Rajbhandari et al. 2020, section 5.2).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from minigpt_dist.parallel.collectives import Group, all_gather_slices
from minigpt_dist.parallel.flat import FlatLayout, FlatParameters
from minigpt_dist.parallel.offload import Offload
from minigpt_dist.parallel.stages.shard import Shard, master_dtype


class ShardedGradients(Shard):
    """A parameter's `grad` lives from its backward until its bucket has taken it.

    Gradients are summed in the master's dtype, or in float64 in exact mode: a slice of that, from the first exchange to the step.
    """

    def __init__(
        self, flat: FlatLayout, rank: int, master: Tensor, exact: bool, offload: Offload | None = None
    ) -> None:
        super().__init__(flat, rank, master, offload)
        self.exact, self.sum_dtype = exact, torch.float64 if exact else master.dtype
        self._used, self._open = [False] * len(flat.params), False
        self._sum: Tensor | None = None

    def use(self, i: int) -> None:
        """This rank has a gradient of parameter i."""
        self._used[i] = self._open = True

    def receive(self, start: int, total: Tensor) -> None:
        """Add this rank's part of the sum over ranks of a bucket that begins at flat element `start`."""
        if self._sum is None:
            self._sum = torch.full_like(self.master, -0.0, dtype=self.sum_dtype)
        begin = max(start, self.lo) - self.lo
        self._sum[begin : begin + total.numel()] += total

    def fold(self) -> bool:
        """Exact mode: close one micro-batch, whose gradients are in the sum already. False if there was nothing."""
        came, self._open = self._open, False
        return came

    def summed(self, group: Group) -> tuple[Tensor, Sequence[bool]]:
        """As in `Shard`; a second call needs another exchange first."""
        total, used = self._sum, self._used
        assert total is not None
        self.zero_grad()
        return total, used

    def gradients(self) -> list[Tensor]:
        """What this rank holds of the gradient's sum over ranks now."""
        return [] if self._sum is None else [self._sum]

    def zero_grad(self) -> None:
        self._used, self._open, self._sum = [False] * len(self._used), False, None


class Stage2(ShardedGradients):
    """Parameters are views into one flat vector."""

    flat: FlatParameters

    def __init__(
        self, params: Sequence[nn.Parameter], world_size: int, rank: int, exact: bool, offload: Offload | None = None
    ) -> None:
        flat = FlatParameters(params, world_size)
        mine = flat.data[flat.bounds[rank] : flat.bounds[rank + 1]]
        super().__init__(flat, rank, mine.to(master_dtype(mine.dtype), copy=True), exact, offload)

    def prepare(self) -> None:
        self.flat.check_views()
        self.adopt(self.flat.data[self.lo : self.hi])

    def gather(self, group: Group) -> None:
        """Cast the updated slice into the parameters and collect everyone's."""
        self.cast_into(self.flat.data[self.lo : self.hi])
        all_gather_slices(self.flat.data, self.flat.bounds, group)
