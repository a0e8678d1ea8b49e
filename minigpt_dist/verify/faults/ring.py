"""A fourth host for faults: correct collectives from sends and receives, in the plain style of the lesson.

Owns a ring and a tree cut into small methods, so that a fault is one of them written wrong. It shares no code with `parallel/p2p`.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class LessonRing:
    """Ring reduce-scatter and all-gather of one flat tensor: everything moves to the next rank."""

    def __init__(self, timeout: float = 60.0) -> None:
        self.world_size, self.rank = dist.get_world_size(), dist.get_rank()
        self.timeout = timedelta(seconds=timeout)

    def slices(self, values: Tensor) -> list[Tensor]:
        """Views, one a rank, the larger first."""
        return list(values.tensor_split(self.world_size))

    def swap(self, outgoing: Tensor, like: Tensor) -> Tensor:
        """Send to the next rank, receive from the one before. RuntimeError that names it, where nothing comes in time."""
        inbox, works = torch.empty_like(like), []
        if outgoing.numel():
            works.append(dist.isend(outgoing.contiguous().view(torch.uint8), (self.rank + 1) % self.world_size))
        if like.numel():
            works.append(dist.irecv(inbox.view(torch.uint8), (self.rank - 1) % self.world_size))
        for work in works:
            self.wait(work)
        return inbox

    def wait(self, work: Any) -> None:
        try:
            work.wait(self.timeout)
        except RuntimeError as error:
            raise RuntimeError(f"rank {(self.rank - 1) % self.world_size} is silent: {error}") from error

    def rounds(self) -> int:
        return self.world_size - 1

    def add(self, own: Tensor, other: Tensor) -> None:
        own += other

    def reduce_scatter(self, values: Tensor) -> None:
        """Leave the sum of slice `rank` in it."""
        parts = self.slices(values)
        for k in range(self.rounds()):
            out, into = ((self.rank - 1 - k - d) % self.world_size for d in (0, 1))
            self.add(parts[into], self.swap(parts[out], parts[into]))

    def all_gather(self, parts: list[Tensor]) -> None:
        """Fill the other ranks' parts, given their lengths."""
        for k in range(self.world_size - 1):
            out, into = ((self.rank - k - d) % self.world_size for d in (0, 1))
            parts[into].copy_(self.swap(parts[out], parts[into]))

    def all_reduce(self, tensor: Tensor) -> None:
        values = tensor.view(-1)
        self.reduce_scatter(values)
        self.all_gather(self.slices(values))


def ring_all_reduce(tensor: Tensor, timeout: float = 60.0) -> None:
    """Sum over ranks, in place."""
    LessonRing(timeout).all_reduce(tensor)


def reduce_scatter(tensor: Tensor) -> Tensor:
    """This rank's slice of the sum."""
    ring, summed = LessonRing(), tensor.clone()
    ring.reduce_scatter(summed)
    return ring.slices(summed)[ring.rank].clone()


def lengths_of(tensor: Tensor, ring: LessonRing) -> list[int]:
    """How many elements every rank brings."""
    counts = [torch.full((1,), tensor.numel()) for _ in range(ring.world_size)]
    ring.all_gather(counts)
    return [int(count) for count in counts]


def all_gather(tensor: Tensor) -> Tensor:
    """All ranks' tensors in rank order."""
    ring = LessonRing()
    parts = [tensor.new_empty(n) for n in lengths_of(tensor, ring)]
    parts[ring.rank] = tensor.clone()
    ring.all_gather(parts)
    return torch.cat(parts)


def tree_broadcast(tensor: Tensor, src: int = 0) -> None:
    """In each round, the ranks that have it send it on, twice as far as the round before: no more than log2(N) times each."""
    N, rank = dist.get_world_size(), dist.get_rank()
    place, span, raw = (rank - src) % N, 1, tensor.view(-1).view(torch.uint8)
    while span < N and tensor.numel():
        if place < span and place + span < N:
            dist.send(raw, (rank + span) % N)
        elif span <= place < 2 * span:
            dist.recv(raw, (rank - span) % N)
        span *= 2


NAMES = {
    "ring_all_reduce": ring_all_reduce,
    "reduce_scatter": reduce_scatter,
    "all_gather": all_gather,
    "tree_broadcast": tree_broadcast,
}
