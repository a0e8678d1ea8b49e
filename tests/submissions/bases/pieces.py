"""A right submission of the pieces that are asked by name: collectives made of sends, schedules, and a guard."""

from __future__ import annotations

import math
from datetime import timedelta

import torch
import torch.distributed as dist


def swap(outgoing, like, timeout=60.0):
    """Send to the next rank, receive from the one before."""
    N, rank = dist.get_world_size(), dist.get_rank()
    before, inbox, works = (rank - 1) % N, torch.empty_like(like), []
    if outgoing.numel():
        works.append(dist.isend(outgoing.contiguous().view(torch.uint8), (rank + 1) % N))
    if like.numel():
        works.append(dist.irecv(inbox.view(torch.uint8), before))
    for work in works:
        try:
            work.wait(timedelta(seconds=timeout))
        except RuntimeError as error:
            raise TimeoutError(f"rank {before} is silent") from error
    return inbox


def reduced(parts, timeout=60.0):
    """Leave the sum of part `rank` in it."""
    N, rank = dist.get_world_size(), dist.get_rank()
    for k in range(N - 1):
        out, into = (rank - 1 - k) % N, (rank - 2 - k) % N
        parts[into] += swap(parts[out], parts[into], timeout)


def passed_round(parts, timeout=60.0):
    """Fill the other ranks' parts."""
    N, rank = dist.get_world_size(), dist.get_rank()
    for k in range(N - 1):
        out, into = (rank - k) % N, (rank - 1 - k) % N
        parts[into].copy_(swap(parts[out], parts[into], timeout))


def ring_all_reduce(tensor, timeout=60.0):
    parts = list(tensor.view(-1).tensor_split(dist.get_world_size()))
    reduced(parts, timeout)
    passed_round(parts, timeout)


def reduce_scatter(tensor):
    parts = list(tensor.clone().tensor_split(dist.get_world_size()))
    reduced(parts)
    return parts[dist.get_rank()].clone()


def all_gather(tensor):
    lengths = [torch.full((1,), tensor.numel()) for _ in range(dist.get_world_size())]
    passed_round(lengths)
    parts = [tensor.new_empty(int(n)) for n in lengths]
    parts[dist.get_rank()] = tensor.clone()
    passed_round(parts)
    return torch.cat(parts)


def tree_broadcast(tensor, src=0):
    N, rank = dist.get_world_size(), dist.get_rank()
    place, span, raw = (rank - src) % N, 1, tensor.view(-1).view(torch.uint8)
    while span < N and tensor.numel():
        if place < span and place + span < N:
            dist.send(raw, (rank + span) % N)
        elif span <= place < 2 * span:
            dist.recv(raw, (rank - span) % N)
        span *= 2


def pipeline_schedule(kind, ranks, micros):
    if kind not in ("gpipe", "1f1b") or ranks < 1 or micros < 1:
        raise ValueError(f"{kind} of {ranks} ranks and {micros} micro-batches")
    rows = []
    for rank in range(ranks):
        ahead = micros if kind == "gpipe" else min(ranks - rank - 1, micros)
        row = [("F", rank, m) for m in range(ahead)]
        for m in range(micros - ahead):
            row += [("F", rank, m + ahead), ("B", rank, m)]
        rows.append(row + [("B", rank, m) for m in range(micros - ahead, micros)])
    return rows


def should_roll_back(loss, gradients, last):
    bad = not (math.isfinite(loss) and all(bool(torch.isfinite(g).all()) for g in gradients))
    seen = torch.tensor([0.0 if bad else loss, float(bad)], dtype=torch.float64)
    dist.all_reduce(seen)
    return bool(seen[1] > 0 or seen[0] / dist.get_world_size() > 2 * last)
