"""Faults of delivery: values that do not reach every rank, come from the wrong one, or arrive changed."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from minigpt_dist.verify.faults import base
from minigpt_dist.verify.faults.catalogue import Names, fault


def _send(tensors: Iterable[Tensor], src: int = 0) -> None:
    for t in tensors:
        whole = t.detach().contiguous()
        dist.broadcast(whole, src=src)
        t.detach().copy_(whole)


@fault(
    source="pytorch/pytorch#111138",
    needs="a buffer filled differently by each rank",
    check="broadcast.first",
    stage="broadcast",
    step=0,
    rank=1,
    tensor="running",
    green=("param_norms",),
)
def broadcast_skips_buffers() -> Names:
    """Only parameters are copied at construction; registered buffers start different on each rank."""
    return {"broadcast_parameters": lambda module, src=0: _send(module.parameters(), src)}


@fault(
    source="allenai/OLMo-core#319",
    needs="ranks seeded differently",
    check="broadcast.first",
    stage="broadcast",
    step=0,
    rank=1,
    tensor="weight",
)
def replicas_start_different() -> Names:
    """No broadcast: every rank keeps the weights of its own seed."""
    return {"broadcast_parameters": lambda module, src=0: None}


@fault(
    source="deepspeedai/DeepSpeed#3090, at the start instead of in a checkpoint",
    needs="a frozen parameter",
    check="broadcast.first",
    stage="broadcast",
    step=0,
    rank=1,
    tensor="frozen",
)
def broadcast_skips_frozen_parameters() -> Names:
    """Parameters that do not require a gradient are left out of the broadcast."""

    def broadcast_parameters(module: nn.Module, src: int = 0) -> None:
        _send([*(p for p in module.parameters() if p.requires_grad), *module.buffers()], src)

    return {"broadcast_parameters": broadcast_parameters}


@fault(
    source="persistent=False buffers and state_dict, pytorch/pytorch#111138",
    needs="a buffer that is not saved",
    check="broadcast.first",
    stage="broadcast",
    step=0,
    rank=1,
    tensor="hidden",
)
def broadcast_sends_the_state_dict_only() -> Names:
    """What is broadcast is state_dict(), which lacks buffers that are not persistent."""
    return {"broadcast_parameters": lambda module, src=0: _send(module.state_dict().values(), src)}


@fault(
    source="mixed-dtype modules under flat broadcasts",
    needs="integer and boolean buffers",
    check="broadcast.first",
    stage="broadcast",
    step=0,
    rank=1,
    tensor="count",
)
def broadcast_skips_integer_buffers() -> Names:
    """Only floating-point tensors are sent."""

    def broadcast_parameters(module: nn.Module, src: int = 0) -> None:
        _send([t for t in [*module.parameters(), *module.buffers()] if t.is_floating_point()], src)

    return {"broadcast_parameters": broadcast_parameters}


@fault(
    source="flat broadcast buffers of one dtype",
    needs="float64 parameters and large integers",
    check="broadcast.first",
    stage="broadcast",
    step=0,
    tensor="fp64",
)
def broadcast_travels_in_float32() -> Names:
    """All tensors travel in one float32 buffer, which loses bits of float64 and of large integers."""

    def broadcast_parameters(module: nn.Module, src: int = 0) -> None:
        tensors = [t.detach() for t in [*module.parameters(), *module.buffers()]]
        flat = torch.cat([t.float().flatten() for t in tensors])
        dist.broadcast(flat, src=src)
        for t, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
            t.copy_(part.view(t.shape))

    return {"broadcast_parameters": broadcast_parameters}


@fault(
    source="hard-coded src=0 in many data-parallel wrappers",
    needs="a source other than rank 0",
    check="broadcast.last",
    stage="broadcast",
    step=0,
    rank=0,
    tensor="weight",
    green=("broadcast.first",),
)
def broadcast_ignores_its_source() -> Names:
    """Rank 0 is always the source, whatever `src` says."""
    return {"broadcast_parameters": lambda module, src=0: base.broadcast_parameters(module)}


@fault(
    source="averaging at the start in place of copying (Horovod users' scripts)",
    needs="ranks seeded differently",
    check="broadcast.first",
    stage="broadcast",
    step=0,
    rank=0,
    tensor="weight",
    equivalent=((1, "the mean over one rank is its own value"),),
)
def broadcast_averages_the_ranks() -> Names:
    """Every rank gets the mean of all ranks' values, so that rank 0's own are changed too."""

    def broadcast_parameters(module: nn.Module, src: int = 0) -> None:
        for t in [*module.parameters(), *module.buffers()]:
            if t.is_floating_point():
                mean = t.detach().double()
                dist.all_reduce(mean)
                t.detach().copy_(mean / dist.get_world_size())
        _send(t for t in module.buffers() if not t.is_floating_point())

    return {"broadcast_parameters": broadcast_parameters}


@fault(
    source="contiguous() returning a copy",
    needs="a parameter that is not contiguous",
    check="broadcast.layouts",
    stage="broadcast",
    step=0,
    rank=1,
    tensor="transposed",
)
def broadcast_into_a_copy() -> Names:
    """A tensor that is not contiguous is copied, the copy is received into and dropped."""

    def broadcast_parameters(module: nn.Module, src: int = 0) -> None:
        for t in [*module.parameters(), *module.buffers()]:
            dist.broadcast(t.detach().contiguous(), src=src)

    return {"broadcast_parameters": broadcast_parameters}


@fault(
    source="deepspeedai/DeepSpeed#7805, the last bucket instead of one in flight",
    needs="a tensor larger than a bucket",
    check="broadcast.first",
    stage="broadcast",
    step=0,
    rank=1,
    tensor="large",
)
def broadcast_drops_what_exceeds_a_bucket() -> Names:
    """Tensors are gathered into buckets of 64 KiB; one that fits into none is never sent."""

    def broadcast_parameters(module: nn.Module, src: int = 0) -> None:
        _send([t for t in [*module.parameters(), *module.buffers()] if t.nbytes <= 1 << 16], src)

    return {"broadcast_parameters": broadcast_parameters}


@fault(
    source="binary-tree broadcast written for powers of two",
    needs="three ranks",
    check="broadcast.first",
    stage="broadcast",
    step=0,
    rank=2,
    tensor="weight",
    world_size=3,
    equivalent=((2, "the tree is complete"), (4, "the tree is complete")),
)
def broadcast_tree_misses_the_odd_rank() -> Names:
    """A tree over floor(log2 N) rounds: the ranks beyond the largest power of two get nothing."""

    def broadcast_parameters(module: nn.Module, src: int = 0) -> None:
        N, rank = dist.get_world_size(), dist.get_rank()
        reach = 1 << (N.bit_length() - 1)
        for t in [*module.parameters(), *module.buffers()]:
            whole, span = t.detach().contiguous(), 1
            while span < reach:
                if rank < span:
                    dist.send(whole, rank + span)
                elif rank < 2 * span:
                    dist.recv(whole, rank - span)
                span *= 2
            t.detach().copy_(whole)

    return {"broadcast_parameters": broadcast_parameters}
