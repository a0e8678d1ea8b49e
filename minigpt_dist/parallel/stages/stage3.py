"""ZeRO stage 3: of parameters too, a rank keeps its own slice alone, which is its master copy.

Owns the pieces of a flat vector that are gathered and freed as one. Leaves when to `units.py` (Rajbhandari et al. 2020, section 5.3).

The vector is cut as in the other stages, so that a checkpoint is the same in all. A piece then often has one owner, which broadcasts
it, as in the paper; an even cut of every piece would spread the sending over all ranks, and tie the cut to the model's modules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from minigpt_dist.parallel.collectives import Group, all_gather_start
from minigpt_dist.parallel.flat import FlatLayout, require_in_place
from minigpt_dist.parallel.offload import Offload
from minigpt_dist.parallel.stages.shard import master_dtype
from minigpt_dist.parallel.stages.stage2 import ShardedGradients


class Stage3(ShardedGradients):
    """A parameter has memory while it is gathered; at other times all its elements are one NaN, so that a use by mistake is seen."""

    def __init__(
        self, params: Sequence[nn.Parameter], world_size: int, rank: int, exact: bool, offload: Offload | None = None
    ) -> None:
        flat = FlatLayout(params, world_size)
        lo, hi = flat.bounds[rank], flat.bounds[rank + 1]
        master = torch.zeros(hi - lo, dtype=master_dtype(flat.dtype), device=flat.device)
        for i, start, stop in flat.pieces(lo, hi):
            first = lo + start - flat.offsets[i]
            master[start:stop] = params[i].detach().reshape(-1)[first : first + stop - start]
        super().__init__(flat, rank, master, exact, offload)
        self.nothing = torch.full((), torch.nan, dtype=flat.dtype, device=flat.device)
        self.segments: list[Segment] = []

    def cut(self, users: Sequence[object]) -> None:
        """Make a segment of each run of parameters with equal `users`, one a parameter."""
        first = 0
        for i in range(1, len(users) + 1):
            if i == len(users) or users[i] != users[first]:
                self.segments.append(Segment(self, first, i))
                first = i

    def prepare(self) -> None:
        for segment in self.segments:
            segment.check()

    def gather(self, group: Group) -> None:
        """Nothing: parameters are gathered when they are used."""


class Segment:
    """Parameters `first` up to `last` of a shard: gathered into one vector, whose memory is given back when they are freed.

    The vector itself stays, as autograd keeps views of it from forward to backward: only its storage comes and goes.
    """

    def __init__(self, shard: Stage3, first: int, last: int) -> None:
        flat = shard.flat
        self.shard, self.params, self.indices = shard, flat.params[first:last], range(first, last)
        self.lo, self.hi = flat.offsets[first], flat.offsets[last - 1] + flat.numels[last - 1]
        self.cuts = flat.cuts(self.lo, self.hi)
        self._freed = [shard.nothing.expand(p.shape) for p in self.params]
        self._coming: Callable[[], None] | None = None
        self._make_vector()
        self._let_go()

    def _make_vector(self) -> None:
        """A vector without memory, and each parameter's view of it."""
        flat = self.shard.flat
        self._full = torch.empty(self.hi - self.lo, dtype=flat.dtype, device=flat.device)
        parts = self._full.split([p.numel() for p in self.params])
        self._views = [part.view(p.shape) for part, p in zip(parts, self.params, strict=True)]
        self._full.untyped_storage().resize_(0)

    def start(self, group: Group) -> None:
        """Start to gather, unless that has been started; all ranks together."""
        if self.whole or self._coming is not None:
            return
        self._full.untyped_storage().resize_(self._full.numel() * self._full.element_size())
        self.shard.cast_into(*self._own())
        self._coming = all_gather_start(self._full, self.cuts, group)

    def finish(self) -> None:
        """Wait until the parameters are whole."""
        if self._coming is None:
            return
        self._coming()
        self._coming, self.whole = None, True
        for p, view in zip(self.params, self._views, strict=True):
            p.data = view

    def free(self) -> None:
        """Give the memory back, whatever state it is in."""
        self.finish()
        if self.whole:
            self._let_go()

    def adopt(self) -> None:
        """Take what was written into whole parameters into the shard."""
        self.shard.adopt(*self._own())

    def check(self) -> None:
        """Raise ValueError if a parameter's memory was replaced."""
        for i, p, view, freed in zip(self.indices, self.params, self._views, self._freed, strict=True):
            require_in_place(i, p, view if self.whole else freed)

    def _own(self) -> tuple[Tensor, int]:
        """This rank's part of the vector, and where it begins in the shard."""
        lo, hi = max(self.lo, self.shard.lo), min(self.hi, self.shard.hi)
        part = slice(lo - self.lo, hi - self.lo) if lo < hi else slice(0)
        return self._full[part], lo - self.shard.lo

    def _let_go(self) -> None:
        self.whole = False
        for p, freed in zip(self.params, self._freed, strict=True):
            p.data = freed
        storage = self._full.untyped_storage()
        if storage.resizable():
            storage.resize_(0)
        else:  # numpy has seen it: whoever still looks at it keeps it
            self._make_vector()
