"""The reducer: gradients leave for their owners bucket by bucket while backward goes on, and are freed.

Owns buckets, their order, and how many are under way. Leaves what an owner does with a sum to its shard (`stage2.py`).
Buckets in backward's order, as in DistributedDataParallel (Li et al. 2020); sent to owners only, and not kept, as in ZeRO stage 2
(Rajbhandari et al. 2020, section 5.2).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minigpt_dist.parallel.collectives import Group, reduce_scatter_start
from minigpt_dist.parallel.exact import snap

if TYPE_CHECKING:
    from minigpt_dist.parallel.stages.stage2 import ShardedGradients

IN_FLIGHT = 1  # buckets under way beside the one that is being filled


class Bucket:
    """Neighbouring parameters of one shard, `first` up to `last`, and while backward is among them, their gradients in one vector."""

    def __init__(self, shard: ShardedGradients, first: int, last: int) -> None:
        flat = shard.flat
        self.shard, self.indices = shard, range(first, last)
        self.lo, self.hi = flat.offsets[first], flat.offsets[last - 1] + flat.numels[last - 1]
        self.cuts = flat.cuts(self.lo, self.hi)
        self.missing = set(self.indices)
        self._vector: Tensor | None = None

    def adopt(self, i: int) -> None:
        """Move the gradient of parameter i into the vector, if there is one."""
        p = self.shard.flat.params[i]
        if p.grad is None:
            return
        grad, p.grad = p.grad.detach(), None
        torch.add(snap(grad) if self.shard.exact else grad, 0.0, out=self._part(i))  # no -0.0: it marks the absent
        self.shard.use(i)
        self.missing.discard(i)

    def start(self, group: Group) -> Callable[[], Tensor]:
        """Send the vector to its owners, -0.0 in the place of gradients that are not there, and let go of it."""
        for i in list(self.missing):
            self.adopt(i)
        for i in self.missing:
            self._part(i).fill_(-0.0)
        self.missing = set(self.indices)
        vector, self._vector = self._full(), None
        return reduce_scatter_start(vector, self.cuts, group)

    def _full(self) -> Tensor:
        if self._vector is None:
            self._vector = torch.empty(self.hi - self.lo, dtype=self.shard.sum_dtype, device=self.shard.flat.device)
        return self._vector

    def _part(self, i: int) -> Tensor:
        flat = self.shard.flat
        start = flat.offsets[i] - self.lo
        return self._full()[start : start + flat.numels[i]].view(flat.params[i].shape)


class Reducer:
    """Exchanges the gradients of all shards, in one order of buckets on all ranks: each as soon as it and those before it are full.

    One exchange of all buckets a backward; a rank that had none before its step does it then. So of all ranks that had backwards
    outside of `no_sync` since the last step, each must have had as many.

    bucket_bytes: of gradients a bucket, at most, or one parameter's. overlap: does backward go on while a bucket is under way?
    """

    def __init__(self, bucket_bytes: int, group: Group, overlap: bool = True) -> None:
        self.bucket_bytes, self.group, self.overlap = bucket_bytes, group, overlap
        self.buckets: list[Bucket] = []
        self._synchronise, self._running, self._exchanges = True, False, 0
        self._started = 0  # buckets of this backward that have left
        self._under_way: deque[tuple[Bucket, Callable[[], Tensor]]] = deque()

    def add(self, shard: ShardedGradients) -> None:
        """Cut a shard's parameters into buckets, last first, and hear of their gradients."""
        params, last = shard.flat.params, len(shard.flat.params)
        while last:
            first, size = last - 1, params[last - 1].nbytes
            while first and size + params[first - 1].nbytes <= self.bucket_bytes:
                first, size = first - 1, size + params[first - 1].nbytes
            bucket = Bucket(shard, first, last)
            self.buckets.append(bucket)
            for i in bucket.indices:
                params[i].register_post_accumulate_grad_hook(lambda _, bucket=bucket, i=i: self._arrived(bucket, i))
            last = first

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside only add to this rank's own gradients, which it keeps whole; the first one outside sends all of it."""
        before, self._synchronise = self._synchronise, False
        try:
            yield
        finally:
            self._synchronise = before

    def flush(self) -> None:
        """At the step: exchange what no backward has. ValueError for gradients that came after an exchange, without one of their own."""
        if not self._exchanges:
            self._finish()
            return
        late = [i for bucket in self.buckets for i in bucket.indices if bucket.shard.flat.params[i].grad is not None]
        if late:
            raise ValueError(
                f"parameter {late[0]} has a gradient of its own at the step, but should have none after an exchange: "
                "end a step's micro-batches with a backward outside of no_sync"
            )

    def reset(self) -> None:
        """Forget all gradients, and that there was an exchange. What a failed backward has left under way is waited for."""
        while self._under_way:
            self._under_way.popleft()[1]()
        for bucket in self.buckets:
            bucket.missing, bucket._vector = set(bucket.indices), None
            for i in bucket.indices:
                bucket.shard.flat.params[i].grad = None
        self._running, self._exchanges, self._started = False, 0, 0

    @torch.no_grad()
    def _arrived(self, bucket: Bucket, i: int) -> None:
        """Backward has the gradient of parameter i of `bucket`."""
        if not self._synchronise:
            return
        if not self._running:
            self._running = True
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)  # as DistributedDataParallel
        bucket.adopt(i)
        while self._started < len(self.buckets) and not self.buckets[self._started].missing:
            self._start_next()

    def _start_next(self) -> None:
        while len(self._under_way) >= IN_FLIGHT:
            self._end_oldest()
        bucket = self.buckets[self._started]
        self._under_way.append((bucket, bucket.start(self.group)))
        self._started += 1
        if not self.overlap:
            self._end_oldest()

    def _end_oldest(self) -> None:
        bucket, wait = self._under_way.popleft()
        bucket.shard.receive(bucket.lo, wait())

    @torch.no_grad()
    def _finish(self) -> None:
        """At the end of backward: exchange the buckets that are left, and wait for all."""
        while self._started < len(self.buckets):
            self._start_next()
        while self._under_way:
            self._end_oldest()
        self._running, self._started = False, 0
        self._exchanges += 1
