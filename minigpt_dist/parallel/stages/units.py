"""Units: modules whose parameters are gathered before they are used and freed after, the next unit's on their way meanwhile.

Owns when: before a unit's forward, and before its backward. Leaves how to `stage3.py`. The moments are those of torch's fully_shard:
a module's forward hooks, a hook on its outputs' gradients, the arrival of its parameters' gradients, the end of backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from minigpt_dist.parallel.collectives import Group, alike
from minigpt_dist.parallel.stages.stage3 import Segment, Stage3

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
PASSIVE = (
    nn.ParameterList,
    nn.ParameterDict,
)  # have no forward: their parameters are used in that of the module around them


def unit_modules(model: nn.Module) -> list[list[nn.Module]]:
    """The modules of each unit of `model`, in declaration order.

    A module in a container (ModuleList, ModuleDict, Sequential) is a unit; so is a run of neighbours that are not: in MiniGPT, the
    embeddings, each block, and the last norm with the head. What belongs to none of them is the unit of `model` itself.
    """
    units: list[list[nn.Module]] = []
    run: list[nn.Module] = []
    for child in model.children():
        if isinstance(child, CONTAINERS) or isinstance(model, CONTAINERS):
            run = []
            units += unit_modules(child) if isinstance(child, CONTAINERS) else [[child]]
        elif not isinstance(child, PASSIVE):
            if not run:
                units.append(run)
            run.append(child)
    return units


class Unit:
    """Some modules that run one after the other, and the segments that hold their parameters."""

    def __init__(self, modules: Sequence[nn.Module], params: set[nn.Parameter]) -> None:
        self.modules, self.params = list(modules), params
        self.segments: list[Segment] = []
        self.ran: set[nn.Module] = set()


class Units:
    """All units of `model`, gathered and freed as they are used.

    All ranks must use them in the same order, as each use is an exchange. The parameters of a unit must be used in the forward of its
    own modules alone; one that several units share is gathered with each of them. overlap: is the next unit gathered meanwhile?
    """

    def __init__(self, model: nn.Module, group: Group, overlap: bool = True) -> None:
        self.overlap = overlap
        self.group = alike(group)  # its own: a gather can never be taken for another exchange that a rank is late with
        found = unit_modules(model)
        taken = {p for modules in found for m in modules for p in m.parameters()}
        self.units = [Unit(modules, {p for m in modules for p in m.parameters()}) for modules in found]
        rest = set(model.parameters()) - taken
        if rest:
            self.units.append(Unit([model], rest))
        self._order, self._seen = list(self.units), list[Unit]()
        self._in_backward: set[Segment] = set()
        self._missing: dict[Segment, set[int]] = {}
        self._pinned = self._queued = False
        model.register_forward_pre_hook(lambda *_: self._begin())
        for unit in self.units:
            for module in unit.modules:
                module.register_forward_pre_hook(lambda m, _, unit=unit: self._before_forward(unit))
                module.register_forward_hook(lambda m, _, out, unit=unit: self._after_forward(unit, m, out))
        model.register_forward_hook(lambda *_: self._end())

    def add(self, shard: Stage3) -> None:
        """Cut a shard into segments, each of one unit or of several that share it. ValueError for a parameter of none."""
        users = [tuple(i for i, unit in enumerate(self.units) if p in unit.params) for p in shard.flat.params]
        if () in users:
            at = users.index(())
            raise ValueError(
                f"parameter {at} of shape {tuple(shard.flat.params[at].shape)} is of no module of the model, but should be"
            )
        shard.cut(users)
        for segment in shard.segments:
            for u in users[segment.indices[0]]:
                self.units[u].segments.append(segment)
            for i, p in zip(segment.indices, segment.params, strict=True):
                p.register_post_accumulate_grad_hook(lambda _, segment=segment, i=i: self._arrived(segment, i))

    @property
    def segments(self) -> list[Segment]:
        return list(dict.fromkeys(segment for unit in self.units for segment in unit.segments))

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Every parameter whole inside; what is written to them there is kept. All ranks together."""
        if self._pinned:
            yield
            return
        self._gather(self.segments)
        self._pinned = True
        try:
            yield
        finally:
            self._pinned = False
            for segment in self.segments:
                segment.adopt()
                segment.free()

    def free(self) -> None:
        """Free every unit: before an update, which would leave them stale."""
        if self._pinned:
            raise ValueError("step was called inside gathered, but should be called after it")
        self._in_backward.clear()
        self._queued = False  # a backward that failed has not ended
        for segment in self.segments:
            segment.free()

    def _gather(self, segments: Sequence[Segment]) -> None:
        for segment in segments:
            segment.start(self.group)
        for segment in segments:
            segment.finish()

    def _prefetch(self, unit: Unit, towards: int) -> None:
        """Start to gather the unit next to `unit` in the order of use."""
        if not self.overlap:
            return
        place = self._order.index(unit) + towards if unit in self._order else -1
        if 0 <= place < len(self._order):
            for segment in self._order[place].segments:
                segment.start(self.group)

    def _begin(self) -> None:
        self._seen = []
        for unit in self.units:
            unit.ran.clear()

    def _before_forward(self, unit: Unit) -> None:
        if unit not in self._seen:
            self._seen.append(unit)
        self._gather(unit.segments)
        if not self._in_backward:  # else backward computes a part of forward again
            self._prefetch(unit, +1)

    def _after_forward(self, unit: Unit, module: nn.Module, out: Any) -> None:
        unit.ran.add(module)
        if len(unit.ran) == len(unit.modules):
            unit.ran.clear()
            # Backward begins with the unit that forward ends with.
            if not (torch.is_grad_enabled() and unit is self._order[-1]):
                self._release(unit.segments)
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(lambda _, unit=unit: self._before_backward(unit))

    def _end(self) -> None:
        """Forward has ended: free units of which a module did not run, and learn the order."""
        if self._seen:
            self._order = self._seen
        last = self._order[-1].segments if torch.is_grad_enabled() else []
        self._release([segment for segment in self.segments if segment not in last])

    def _release(self, segments: Sequence[Segment]) -> None:
        for segment in segments:
            if not self._pinned and segment not in self._in_backward:
                segment.free()

    def _before_backward(self, unit: Unit) -> None:
        if not self._queued:
            self._queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_ended)  # as DistributedDataParallel
        for segment in unit.segments:
            if segment not in self._in_backward:
                self._in_backward.add(segment)
                self._missing[segment] = set(segment.indices)
        self._gather(unit.segments)
        self._prefetch(unit, -1)

    def _arrived(self, segment: Segment, i: int) -> None:
        """The gradient of parameter i is complete: nothing in this backward uses the parameter any more."""
        if segment in self._in_backward:
            self._missing[segment].discard(i)
            if not self._missing[segment]:
                self._in_backward.discard(segment)
                self._release([segment])

    def _backward_ended(self) -> None:
        self._queued = False
        self._in_backward.clear()
        self._release(self.segments)
