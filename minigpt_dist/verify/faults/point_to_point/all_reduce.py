"""Faults of the ring all-reduce: which slice goes where, in how many rounds, in what type, and who waits for whom."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from minigpt_dist.verify.faults import ring
from minigpt_dist.verify.faults.catalogue import Names, fault
from minigpt_dist.verify.faults.ring import LessonRing


def _ring(kind: type[LessonRing]) -> Names:
    """All-reduce by another ring."""

    def ring_all_reduce(tensor: Tensor, timeout: float = 60.0) -> None:
        kind(timeout).all_reduce(tensor)

    return {"ring_all_reduce": ring_all_reduce}


def _reduced(how: Callable[[Tensor], Any]) -> Names:
    """All-reduce by a plain function."""
    return {"ring_all_reduce": lambda tensor: how(tensor)}


@fault(
    source="rings that cut numel // N elements a rank",
    needs="a length that N does not divide",
    check="collectives.all_reduce",
    stage="reduce",
    rank=0,
)
def ring_drops_the_remainder() -> Names:
    """Slices have numel // N elements; what is left over is never added up."""

    class Ring(LessonRing):
        def slices(self, values: Tensor) -> list[Tensor]:
            n = values.numel() // self.world_size
            return [values[r * n : (r + 1) * n] for r in range(self.world_size)]

    return _ring(Ring)


@fault(
    source="off-by-one in the rounds of a ring",
    needs="three ranks",
    check="collectives.all_reduce",
    stage="reduce",
    world_size=3,
)
def ring_stops_a_round_early() -> Names:
    """Reduce-scatter runs N - 2 rounds: every slice lacks one rank's share."""

    class Ring(LessonRing):
        def rounds(self) -> int:
            return self.world_size - 2

    return _ring(Ring)


@fault(
    source="horovod's and DDP's averaging all-reduce",
    needs="any tensor",
    check="collectives.all_reduce",
    stage="reduce",
    rank=0,
    green=("collectives.reduce_scatter",),
)
def ring_averages() -> Names:
    """The sum is divided by the number of ranks, which the caller does again."""

    def how(tensor: Tensor) -> None:
        ring.ring_all_reduce(tensor)
        tensor.div_(dist.get_world_size(), rounding_mode=None if tensor.is_floating_point() else "floor")

    return _reduced(how)


@fault(
    source="functional all-reduce in place of the in-place one",
    needs="a caller that reads the tensor it gave",
    check="collectives.all_reduce",
    stage="reduce",
    rank=0,
)
def ring_returns_a_copy() -> Names:
    """The sum is returned as a new tensor; the one that was given keeps this rank's own values."""

    def how(tensor: Tensor) -> Tensor:
        summed = tensor.clone()
        ring.ring_all_reduce(summed)
        return summed

    return _reduced(how)


@fault(
    source="bf16 communication hooks left on",
    needs="numbers that are not whole",
    check="collectives.rounding",
    stage="reduce",
    rank=0,
    green=("collectives.all_reduce",),
)
def ring_travels_in_bfloat16() -> Names:
    """Every partial sum travels in bfloat16, though the tensor is float32."""

    class Ring(LessonRing):
        def swap(self, outgoing: Tensor, like: Tensor) -> Tensor:
            if like.dtype != torch.float32:
                return super().swap(outgoing, like)
            return super().swap(outgoing.bfloat16(), like.bfloat16()).float()

    return _ring(Ring)


@fault(
    source="all-gather, then a local sum that begins with the own share",
    needs="rounded sums over three ranks",
    check="collectives.rounding",
    stage="reduce",
    world_size=3,
    green=("collectives.all_reduce",),
    equivalent=((2, "a sum of two does not depend on order"),),
)
def ring_adds_from_the_own_rank_on() -> Names:
    """Every rank collects all tensors and adds them up beginning with its own: ranks differ in the last bit."""

    def how(tensor: Tensor) -> None:
        N, rank = dist.get_world_size(), dist.get_rank()
        parts = list(ring.all_gather(tensor.view(-1)).view(N, -1))
        total = parts[rank].clone()
        for k in range(1, N):
            total += parts[(rank + k) % N]
        tensor.copy_(total.view(tensor.shape))

    return _reduced(how)


@fault(
    source="naive all-reduce by N - 1 whole exchanges",
    needs="three ranks, and bytes that are counted",
    check="collectives.traffic",
    stage="reduce",
    rank=0,
    world_size=3,
    green=("collectives.all_reduce",),
    equivalent=((2, "two halves are as much as one whole"),),
)
def ring_sends_whole_tensors() -> Names:
    """Whole tensors go round N - 1 times: right sums, (N-1)T bytes a rank in place of 2T(N-1)/N."""

    def how(tensor: Tensor) -> None:
        path, passing = LessonRing(), tensor.view(-1).clone()
        total = passing.clone()
        for _ in range(path.world_size - 1):
            passing = path.swap(passing, passing)
            total += passing
        tensor.copy_(total.view(tensor.shape))

    return _reduced(how)


@fault(
    source="submissions that call the backend",
    needs="a look at the calls made",
    check="collectives.traffic",
    stage="reduce",
    rank=0,
    green=("collectives.all_reduce",),
)
def ring_is_the_backends() -> Names:
    """The work is left to dist.all_reduce."""
    return _reduced(lambda tensor: dist.all_reduce(tensor))


@fault(
    source="pytorch/pytorch#172668",
    needs="blocking sends on all ranks",
    check="collectives.all_reduce",
    stage="reduce",
    hangs=True,
)
def both_ranks_send_first() -> Names:
    """Every rank sends and waits until it has been taken before it receives: all wait for each other."""

    class Ring(LessonRing):
        def swap(self, outgoing: Tensor, like: Tensor) -> Tensor:
            inbox = torch.empty_like(like)
            if outgoing.numel():
                dist.send(outgoing.contiguous().view(torch.uint8), (self.rank + 1) % self.world_size)
            if like.numel():
                dist.recv(inbox.view(torch.uint8), (self.rank - 1) % self.world_size)
            return inbox

    return _ring(Ring)


@fault(
    source="pytorch/pytorch#111646, a lost worker not noticed",
    needs="a rank that takes no part",
    check="collectives.silent",
    stage="reduce",
    rank=0,
)
def silent_rank_has_no_name() -> Names:
    """The error after the time-out does not say which rank was waited for."""

    class Ring(LessonRing):
        def wait(self, work: Any) -> None:
            try:
                work.wait(self.timeout)
            except RuntimeError:
                raise RuntimeError("timed out") from None

    return _ring(Ring)
