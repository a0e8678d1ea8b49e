"""DistributedDataParallel: every rank holds the whole module, and each backward ends with the mean gradient over ranks in `p.grad`.

Owns when gradients are exchanged: bucket by bucket, in one order on all ranks, each as soon as it and those before it are full, while
backward goes on (Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB).
Leaves the layout of buckets to `buckets.py`, the equal start to `ddp.py`, and the update to any optimizer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from minigpt_dist.parallel.buckets import Bucket, assign
from minigpt_dist.parallel.collectives import Group, Work, all_reduce_start, broadcast, world
from minigpt_dist.parallel.ddp import broadcast_parameters


class DistributedDataParallel(nn.Module):
    """`module` on every rank of `group`, its gradients averaged over ranks.

    A parameter that no rank's backward reached keeps its `grad` as it was; one that some reached gets the mean, the others
    counting as zero. No rank need say in advance which. Frozen parameters take no part; a tied one takes part once.

    Args:
        module: its parameters and buffers become rank 0's. On the meta device they are made here, by each submodule's
            `reset_parameters`, on `device`.
        bucket_mb: MiB of gradients a message.
        broadcast_buffers: before each forward in training, buffers become rank 0's.
        device: where to materialise a module on the meta device; the CPU by default.

    Raises ValueError, on all ranks, for modules that differ in names, shapes or dtypes, and for a meta module that cannot be filled.
    """

    def __init__(
        self,
        module: nn.Module,
        group: Group = None,
        bucket_mb: float = 25.0,
        broadcast_buffers: bool = True,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if not bucket_mb > 0:
            raise ValueError(f"bucket_mb is {bucket_mb!r}, but should be above 0")
        materialise(module, torch.device(device or "cpu"))
        broadcast_parameters(module, group=group)
        self.module = module
        self._group, self._broadcast_buffers = group, broadcast_buffers
        self._names = [name for name, p in module.named_parameters() if p.requires_grad]
        params = [p for p in module.parameters() if p.requires_grad]
        self._params = params
        self._buckets = [Bucket([params[i] for i in chosen]) for chosen in assign(params, int(bucket_mb * 2**20))]
        self._synchronise = True
        self._reset()
        for b, bucket in enumerate(self._buckets):
            for i, p in enumerate(bucket.params):
                p.register_post_accumulate_grad_hook(lambda _, b=b, i=i: self._arrived(b, i))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module returns. ValueError if another set of parameters is trainable than at construction."""
        trainable = [name for name, p in self.module.named_parameters() if p.requires_grad]
        if trainable != self._names:
            changed = sorted(set(trainable) ^ set(self._names))
            raise ValueError(
                f"requires_grad of {changed[0] if changed else 'a parameter'} changed, but should be as when the module was wrapped"
            )
        if self._broadcast_buffers and self.training and self._synchronise:
            for buffer in self.module.buffers():
                broadcast(buffer, group=self._group)
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside add to this rank's own gradients; the first one outside averages all of it."""
        before, self._synchronise = self._synchronise, False
        try:
            yield
        finally:
            self._synchronise = before

    def _reset(self) -> None:
        """Nothing has arrived in this backward."""
        self._running = False
        self._missing = [set(range(len(bucket.params))) for bucket in self._buckets]
        self._works: list[Work | None] = []

    def _arrived(self, b: int, i: int) -> None:
        """Backward has added to parameter i of bucket b."""
        self._buckets[b].adopt(i)
        if not self._synchronise:
            return
        if not self._running:
            self._running = True
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)  # as torch's own does
        self._missing[b].discard(i)
        while len(self._works) < len(self._buckets) and not self._missing[len(self._works)]:
            self._launch(len(self._works))

    def _launch(self, b: int) -> None:
        """Start the exchange of bucket b."""
        self._buckets[b].prepare()
        self._works.append(all_reduce_start(self._buckets[b].flat, self._group))

    def _finish(self) -> None:
        """At the end of backward: exchange what is left, wait for all, divide by the number of ranks."""
        while len(self._works) < len(self._buckets):
            self._launch(len(self._works))
        for bucket, work in zip(self._buckets, self._works, strict=True):
            if work is not None:
                work.wait()
            bucket.settle(world(self._group)[0])
        self._reset()


def materialise(module: nn.Module, device: torch.device) -> None:
    """Give tensors on the meta device memory on `device`, and values by `reset_parameters` of the submodules that hold them, in place.

    ValueError, before anything is changed, names a submodule that has such tensors and no `reset_parameters`.
    """
    owners = [
        (name, m)
        for name, m in module.named_modules()
        if any(t.is_meta for t in (*m.parameters(False), *m.buffers(False)))
    ]
    for name, m in owners:
        if not callable(getattr(m, "reset_parameters", None)):
            raise ValueError(
                f"{name or type(m).__name__} is on the meta device, but should have a reset_parameters to be filled by"
            )
    for _, m in owners:
        m.to_empty(device=device, recurse=False)
        m.reset_parameters()
