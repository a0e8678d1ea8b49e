"""Faults of collectives made of sends: which slice goes where, in how many rounds, in what type, and who waits for whom."""

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


@fault(
    source="deepspeedai/DeepSpeed#5283, slices in another order than ranks",
    needs="two ranks",
    check="collectives.reduce_scatter",
    stage="reduce",
    rank=0,
    green=("collectives.all_reduce",),
)
def reduce_scatter_returns_the_neighbours_slice() -> Names:
    """The sum that a rank returns is the next rank's slice."""

    def reduce_scatter(tensor: Tensor) -> Tensor:
        path, summed = LessonRing(), tensor.clone()
        path.all_reduce(summed)
        return path.slices(summed)[(path.rank + 1) % path.world_size].clone()

    return {"reduce_scatter": reduce_scatter}


@fault(
    source="in-place reduction of the caller's buffer",
    needs="a look at the input afterwards",
    check="collectives.reduce_scatter",
    stage="reduce",
    rank=0,
)
def reduce_scatter_overwrites_its_input() -> Names:
    """Partial sums are left in the tensor that was given."""

    def reduce_scatter(tensor: Tensor) -> Tensor:
        path = LessonRing()
        path.reduce_scatter(tensor)
        return path.slices(tensor)[path.rank].clone()

    return {"reduce_scatter": reduce_scatter}


@fault(
    source="all_gather of uneven shards, padded",
    needs="ranks that bring different lengths",
    check="collectives.all_gather",
    stage="gather",
    rank=0,
)
def gather_keeps_the_padding() -> Names:
    """Parts are padded to the longest, and the padding is not cut off again."""

    def all_gather(tensor: Tensor) -> Tensor:
        longest = max(ring.lengths_of(tensor, LessonRing()))
        return ring.all_gather(torch.cat([tensor, tensor.new_zeros(longest - tensor.numel())]))

    return {"all_gather": all_gather}


@fault(
    source="deepspeedai/DeepSpeed#5283",
    needs="two ranks",
    check="collectives.all_gather",
    stage="gather",
    rank=1,
    green=("collectives.all_reduce",),
)
def gather_begins_with_the_own_part() -> Names:
    """Parts are joined in the order in which they arrive, the rank's own first."""

    def all_gather(tensor: Tensor) -> Tensor:
        path = LessonRing()
        ends = torch.tensor(ring.lengths_of(tensor, path)).cumsum(0).tolist()
        parts = ring.all_gather(tensor).tensor_split(ends[:-1])
        return torch.cat([parts[(path.rank - k) % path.world_size] for k in range(path.world_size)])

    return {"all_gather": all_gather}


@fault(
    source="hard-coded src=0 in many data-parallel wrappers",
    needs="a source other than rank 0",
    check="collectives.broadcast",
    stage="broadcast",
    rank=0,
)
def tree_has_rank_0_at_its_root() -> Names:
    """The source is ignored: rank 0's tensor reaches everybody."""
    return {"tree_broadcast": lambda tensor, src=0: ring.tree_broadcast(tensor, 0)}


@fault(
    source="broadcast as a loop over ranks",
    needs="four ranks, and bytes that are counted",
    check="collectives.traffic",
    stage="broadcast",
    rank=0,
    world_size=4,
    green=("collectives.broadcast",),
    equivalent=((2, "one child is a tree"), (3, "the tree's root has two children too")),
)
def tree_is_a_star() -> Names:
    """The source sends to every rank itself: N - 1 messages one after the other in place of log2 N."""

    def tree_broadcast(tensor: Tensor, src: int = 0) -> None:
        raw = tensor.view(-1).view(torch.uint8)
        for rank in range(dist.get_world_size() if tensor.numel() else 0):
            if rank != src and dist.get_rank() == src:
                dist.send(raw, rank)
            elif rank == dist.get_rank() != src:
                dist.recv(raw, src)

    return {"tree_broadcast": tree_broadcast}
