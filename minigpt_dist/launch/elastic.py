"""Being a rank that torch elastic (`torchrun`) has started: join its world, leave it in order.

Owns the process group's life under a launcher that is not ours.  Leaves starting and restarting ranks to elastic.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from minigpt_dist.launch import ledger
from minigpt_dist.launch.device import choose_backend

__all__ = ["attach_elastic", "under_torchrun"]

_RENDEZVOUS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def under_torchrun() -> bool:
    """Whether a launcher has told this process its place: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are all set."""
    return all(name in os.environ for name in _RENDEZVOUS)


@contextmanager
def attach_elastic(
    backend: str | None = None, device: str = "cpu", timeout_s: float = 600.0
) -> Iterator[tuple[int, int]]:
    """Join the world that the environment describes, yield (rank, world_size), leave it at the end.

    Args:
        backend: name of the process-group back end; by default what suits `device`.
        device: "cpu" or "cuda:I", where this rank computes.
        timeout_s: seconds after which a collective that lacks a rank fails; elastic then ends the others.

    Raises ValueError outside a launcher, or for a time-out that is not positive.
    """
    missing = [name for name in _RENDEZVOUS if name not in os.environ]
    if missing:
        raise ValueError(f"the environment lacks {', '.join(missing)}, which a launcher such as torchrun sets")
    if not timeout_s > 0:
        raise ValueError(f"timeout_s is {timeout_s}, expected a positive number of seconds")
    backend = backend or choose_backend(device)
    torch.set_num_threads(1)
    if torch.device(device).type == "cuda":
        torch.cuda.set_device(device)
    ledger.install()
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    try:
        yield dist.get_rank(), dist.get_world_size()
        dist.barrier()  # a rank that leaves first would close connections that others still use
    except BaseException:
        if backend == "gloo":  # closing tells the others at once; NCCL may block here on what is still in flight
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()
