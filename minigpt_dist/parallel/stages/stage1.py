"""ZeRO stage 1: every rank keeps all parameters and all of its own gradients, and exchanges them once, at the step.

Owns the reduce-scatter of the flat gradient and the all-gather of the flat parameters (Rajbhandari et al. 2020, section 5.1).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from minigpt_dist.parallel.collectives import Group, all_gather_slices, reduce_scatter_sum
from minigpt_dist.parallel.exact import snap
from minigpt_dist.parallel.flat import FlatBuffer
from minigpt_dist.parallel.offload import Offload
from minigpt_dist.parallel.stages.shard import Shard, master_dtype


class Stage1(Shard):
    """Parameters and gradients are views into one flat vector each."""

    flat: FlatBuffer

    def __init__(
        self, params: Sequence[nn.Parameter], world_size: int, rank: int, exact: bool, offload: Offload | None = None
    ) -> None:
        flat = FlatBuffer(params, world_size)
        mine = flat.data[flat.bounds[rank] : flat.bounds[rank + 1]]
        super().__init__(flat, rank, mine.to(master_dtype(mine.dtype), copy=True), offload)
        self.accumulator = torch.zeros(self.flat.padded, dtype=torch.float64) if exact else None
        self.folded = [False] * len(params)

    def prepare(self) -> None:
        self.flat.check_views()
        self.adopt(self.flat.data[self.lo : self.hi])

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

    def summed(self, group: Group) -> tuple[Tensor, Sequence[bool]]:
        """As in `Shard`.

        From here to `gather` the parameters are only in their owners' master copies: their own memory receives what other
        ranks send, so that a step needs no third buffer of the model's size.
        """
        used = self.flat.present() if self.accumulator is None else self.folded
        if self.accumulator is not None:
            source = self.accumulator
        else:
            self.flat.collect()
            source = self.flat.grad.to(self.master.dtype)
        self.flat.mark_absent(source, used, -0.0)
        inbox = self.flat.data if self.flat.data.dtype == source.dtype else None
        total = reduce_scatter_sum(source, self.flat.bounds, group, inbox)
        self.flat.mark_absent(source, used, 0.0)  # a later backward without zero_grad adds to zeros again
        return total, used

    def gather(self, group: Group) -> None:
        """Cast the updated slice into the parameters and collect everyone's."""
        self.cast_into(self.flat.data[self.lo : self.hi])
        all_gather_slices(self.flat.data, self.flat.bounds, group)

    def zero_grad(self) -> None:
        self.flat.zero_grad()
        if self.accumulator is not None:
            self.accumulator.zero_()
            self.folded = [False] * len(self.folded)
