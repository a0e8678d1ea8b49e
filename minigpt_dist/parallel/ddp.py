"""Data-parallel start: one call after which every rank holds rank 0's parameters and buffers.

Owns the broadcast at construction. Leaves gradient averaging to the optimizer.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from minigpt_dist.parallel.collectives import Group, broadcast, exchange, world

BUCKET_BYTES = 32 * 2**20


def named_state(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Every parameter, frozen ones too, and every buffer, persistent or not, each once, in declaration order."""
    return [*module.named_parameters(), *module.named_buffers()]


def _describe(named: Iterable[tuple[str, Tensor]]) -> list[str]:
    return [f"{name} {tuple(t.shape)} {t.dtype}" for name, t in named]


def require_same_on_all_ranks(what: str, lines: list[str], group: Group = None) -> None:
    """Raise ValueError on *every* rank, naming the first difference, unless all ranks pass equal `lines`."""
    digest = hashlib.sha256(json.dumps(lines).encode()).digest()
    if len(set(exchange(digest, group))) == 1:
        return
    everyone: list[list[str]] = [json.loads(raw) for raw in exchange(json.dumps(lines).encode(), group)]
    for rank, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            at = next((i for i, (a, b) in enumerate(zip(theirs, everyone[0], strict=False)) if a != b), None)
            seen, wanted = (theirs[at], everyone[0][at]) if at is not None else (len(theirs), len(everyone[0]))
            raise ValueError(f"{what} of rank {rank} is {seen}, but should be {wanted}, as on rank 0")


def broadcast_parameters(module: nn.Module, src: int = 0, group: Group = None) -> None:
    """Copy parameters and buffers of rank `src` to all ranks, bit for bit, in place.

    Tensors of every dtype and shape travel as bytes, in buckets of at most 32 MiB (or one tensor): a tiny model is one
    message. Raises ValueError, on all ranks, for a `src` outside the world or modules that differ in names, shapes or dtypes.
    """
    N, _ = world(group)
    if not 0 <= src < N:
        raise ValueError(f"src is {src}, but should be a rank of the world, 0 to {N - 1}")
    named = named_state(module)
    require_same_on_all_ranks("a tensor", _describe(named), group)
    broadcast_tensors([t.detach() for _, t in named], src, group)


def broadcast_tensors(tensors: Iterable[Tensor], src: int, group: Group = None) -> None:
    """Overwrite `tensors`, alike in number, shapes and dtypes on all ranks, with rank `src`'s, in place."""
    bucket: list[Tensor] = []
    for tensor in tensors:
        if bucket and sum(t.nbytes for t in (*bucket, tensor)) > BUCKET_BYTES:
            _broadcast_bucket(bucket, src, group)
            bucket = []
        bucket.append(tensor)
    _broadcast_bucket(bucket, src, group)


def _broadcast_bucket(tensors: list[Tensor], src: int, group: Group) -> None:
    """One message for all `tensors`, then each is overwritten from its bytes."""
    if world(group)[0] == 1 or not any(t.nbytes for t in tensors):
        return
    raw = torch.cat([t.contiguous().view(-1).view(torch.uint8) for t in tensors])
    broadcast(raw, src, group)
    for tensor, part in zip(tensors, raw.split([t.nbytes for t in tensors]), strict=True):
        # clone: a slice of the message need not start where its dtype may start
        tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))
