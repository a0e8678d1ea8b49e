"""Which device a rank computes on, and which back end carries its tensors.

Owns the two choices.  Leaves starting anything on them to `rank` and `elastic`.
"""

from __future__ import annotations

import os

import torch

__all__ = ["choose_backend", "choose_device"]


def choose_backend(device: str | torch.device) -> str:
    """Return the name of the process-group back end for tensors on `device`: nccl for CUDA, gloo for the CPU.

    Raises ValueError for any other device.
    """
    kind = torch.device(device).type
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"device is {str(device)!r}, expected cpu or cuda")
    return "nccl" if kind == "cuda" else "gloo"


def choose_device(requested: str, rank: int) -> str:
    """Return "cpu" or "cuda:I", I being `rank`'s place on its machine (LOCAL_RANK where a launcher set it).

    Args:
        requested: "cpu", "cuda", or "auto": CUDA where each rank of this machine has a device of its own, else the CPU.
        rank: global rank, from 0.

    Raises ValueError for another request, or where CUDA is asked for and this rank has no device.
    """
    if requested not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device is {requested!r}, expected auto, cpu or cuda")
    if requested == "cpu":
        return "cpu"
    place = int(os.environ.get("LOCAL_RANK", rank))
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", place + 1))
    devices = torch.cuda.device_count()
    if requested == "auto" and devices < ranks_here:
        return "cpu"  # on every rank of the machine alike: two ranks cannot share a device under NCCL
    if devices <= place:
        raise ValueError(f"rank {rank} needs CUDA device {place}, but this machine shows {devices}")
    return f"cuda:{place}"
