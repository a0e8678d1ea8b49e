"""Every collective the package uses: the one file that calls `torch.distributed` for data.

Owns the order in which numbers from different ranks are added (rank order, always) and the handling of uneven shards.
Leaves starting processes and rendezvous to `launch/`, and what the numbers mean to its callers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

Group = dist.ProcessGroup | None
Work = dist.Work
ONE_ROUND_BYTES = 2**20  # above it, copying the slice N times costs more than the wake-ups that it saves


def world(group: Group = None) -> tuple[int, int]:
    """(world size, this process's rank) in `group`; (1, 0) where no process group exists."""
    if not dist.is_initialized():
        return 1, 0
    return dist.get_world_size(group), dist.get_rank(group)


def subgroup(ranks: Sequence[int]) -> Group:
    """A group of `ranks`, global and ascending, this one among them. Its members call it together; other ranks need not.

    Each of its members must have made as many groups before: torch names a group by its ranks and that number, and where names differ,
    members wait for each other.

    None, the world's own, where all ranks are in it. A rank alone gets a group of one, in which nothing is sent.
    """
    N, _ = world()
    if len(ranks) == N:
        return None
    group: dist.ProcessGroup = dist.new_group(list(ranks), use_local_synchronization=True)
    return group


def alike(group: Group) -> Group:
    """Another group of the same ranks, whose exchanges are told apart from those of `group`. As `subgroup` for the rest."""
    N, _ = world(group)
    if N == 1:
        return group
    made: dist.ProcessGroup = dist.new_group(dist.get_process_group_ranks(group), use_local_synchronization=True)
    return made


def _communication_device(group: Group) -> torch.device:
    """Where tensors must live to be sent: NCCL moves only CUDA tensors."""
    if dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def broadcast(tensor: Tensor, src: int = 0, group: Group = None) -> None:
    """Overwrite `tensor` on every rank with rank `src`'s, counted within `group`, in place."""
    if world(group)[0] > 1:
        dist.broadcast(tensor, src=src if group is None else dist.get_global_rank(group, src), group=group)


def all_reduce_sum(tensor: Tensor, group: Group = None) -> Tensor:
    """Sum `tensor` over ranks, in place, and return it: the same bits on all ranks. The order of the sum is the backend's.

    For small control values, and for activations, whose sum over a tensor axis no layout of the same bits is compared with.
    """
    if world(group)[0] > 1:
        dist.all_reduce(tensor, group=group)
    return tensor


def all_reduce_max(tensor: Tensor, group: Group = None) -> Tensor:
    """The elementwise maximum of `tensor` over ranks, in place, and returned."""
    if world(group)[0] > 1:
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)
    return tensor


def all_reduce_start(tensor: Tensor, group: Group = None) -> Work | None:
    """Start to sum `tensor` over ranks, in place: done once the returned work has been waited for; None where there is one rank.

    The order of the sum is that of the backend's ring.
    """
    return dist.all_reduce(tensor, group=group, async_op=True) if world(group)[0] > 1 else None


def reduce_scatter_sum(flat: Tensor, bounds: Sequence[int], group: Group = None, inbox: Tensor | None = None) -> Tensor:
    """This rank's slice of the sum of `flat` over ranks: as `reduce_scatter_start`, and done on return."""
    return reduce_scatter_start(flat, bounds, group, inbox)()


def reduce_scatter_start(
    flat: Tensor, bounds: Sequence[int], group: Group = None, inbox: Tensor | None = None
) -> Callable[[], Tensor]:
    """Start to sum `flat` over ranks; what is returned waits, and returns this rank's slice of the sum.

    The slice has bounds[rank+1] - bounds[rank] elements, none of them in `flat`, which must stay as it is until then.

    Args:
        flat: 1-D, the same length on all ranks, not modified.
        bounds: N+1 cuts, non-decreasing, from 0 to flat.numel(); rank r owns [bounds[r], bounds[r+1]).
        inbox: memory to receive into, and of which the result may be a part: 1-D, N times as long as the result, of
            flat's dtype. Default: new memory.

    One `all_to_all_single`, then a sum in rank order ((g0+g1)+g2)+...: N-1 slices leave and arrive, half of what
    gloo's reduce_scatter_tensor moves (it is an all_reduce inside), and no bit depends on where the cuts are.
    """
    N, rank = world(group)
    mine = bounds[rank + 1] - bounds[rank]
    if N == 1:
        return lambda: flat[bounds[0] : bounds[1]].clone()
    sizes = [bounds[r + 1] - bounds[r] for r in range(N)]
    received = torch.empty(N * mine, dtype=flat.dtype, device=flat.device) if inbox is None else inbox
    # No split lists where all are equal: the backend takes its cheaper path.
    taken, given = ([mine] * N, sizes) if min(sizes) != max(sizes) else (None, None)
    work = dist.all_to_all_single(received, flat, taken, given, group=group, async_op=True)

    def finish() -> Tensor:
        work.wait()
        slices = received.view(N, mine)
        total = slices[0]
        for r in range(1, N):
            total += slices[r]
        return total

    return finish


def all_gather_slices(flat: Tensor, bounds: Sequence[int], group: Group = None) -> None:
    """Fill `flat` on every rank, in place: as `all_gather_start`, and done on return."""
    all_gather_start(flat, bounds, group)()


def all_gather_start(flat: Tensor, bounds: Sequence[int], group: Group = None) -> Callable[[], None]:
    """Start to fill `flat` on every rank, in place: slice [bounds[r], bounds[r+1]) comes from rank r. What is returned waits.

    Not by the backend's all-gather: gloo's is a ring of N-1 rounds, so each rank sleeps and is woken N-1 times. A small
    `flat` takes one round, in which every rank sends its slice to all; in a large one each rank broadcasts its slice, which
    is sent from and received into `flat` itself.
    """
    N, rank = world(group)
    if N == 1:
        return lambda: None
    sizes = [bounds[r + 1] - bounds[r] for r in range(N)]
    owners = [r for r in range(N) if sizes[r]]
    if flat.nbytes <= ONE_ROUND_BYTES and len(owners) > 1:
        outbox = flat[bounds[rank] : bounds[rank + 1]].repeat(N)
        works = [dist.all_to_all_single(flat, outbox, sizes, [sizes[rank]] * N, group=group, async_op=True)]
    else:
        works = [
            dist.broadcast(flat[bounds[r] : bounds[r + 1]], src=_global_rank(group, r), group=group, async_op=True)
            for r in owners
        ]

    def finish() -> None:
        for work in works:
            work.wait()

    return finish


def _global_rank(group: Group, rank: int) -> int:
    return rank if group is None else dist.get_global_rank(group, rank)


def exchange(payload: bytes, group: Group = None) -> list[bytes]:
    """Every rank's `payload`, in rank order. Lengths may differ, and may be zero."""
    N, _ = world(group)
    if N == 1:
        return [payload]
    device = _communication_device(group)
    lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(N)]
    dist.all_gather(lengths, torch.tensor([len(payload)], device=device), group=group)
    sizes = [int(length) for length in lengths]
    width = max(sizes)
    if width == 0:
        return [b""] * N
    padded = torch.zeros(width, dtype=torch.uint8, device=device)
    if payload:
        padded[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    rows = [torch.empty(width, dtype=torch.uint8, device=device) for _ in range(N)]
    dist.all_gather(rows, padded, group=group)
    return [row[:size].cpu().numpy().tobytes() for row, size in zip(rows, sizes, strict=True)]


def barrier(group: Group = None) -> None:
    """Return when every rank has called it."""
    if world(group)[0] > 1:
        dist.barrier(group)
