"""Bytes of model states that a rank really holds, without ZeRO and in each of its stages, between backward and step.

Owns the runs that are looked at. Leaves counting, and what should be counted, to `memory`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from minigpt_dist.config import ModelConfig
from minigpt_dist.launch import run_world
from minigpt_dist.memory import baseline, census, state_bytes
from minigpt_dist.model import MiniGPT
from minigpt_dist.parallel.collectives import world
from minigpt_dist.parallel.data_parallel import DistributedDataParallel
from minigpt_dist.parallel.zero import ZeroOptimizer

STAGES = (0, 1, 2, 3)
DTYPES = ("float32", "bfloat16")
NUMEL = ModelConfig().numel()
Measured = dict[str, list[int]]  # dtype -> bytes, by stage


def measure_states(world_size: int, deadline_s: float) -> Measured:
    """Bytes of parameters, gradients and optimizer of the rank that holds most, for the default MiniGPT."""
    ranks = run_world(states_body, world_size, deadline_s=deadline_s)
    return {dtype: [max(held) for held in zip(*(rank[dtype] for rank in ranks), strict=True)] for dtype in DTYPES}


def padding(stage: int, world_size: int) -> int:
    """Bytes that a rank may hold beyond what is predicted: below one element a rank, 20 bytes each, of what is cut evenly; where nothing
    is cut, two numbers for each of the model's tensors, the mark in its bucket and AdamW's count of steps.
    """
    return 20 * world_size if stage else 8 * len(list(MiniGPT().parameters()))


def unlike(held: int, stage: int, dtype: str, world_size: int) -> bool:
    """Is what a rank holds other than predicted, up to padding?"""
    predicted = NUMEL * sum(state_bytes(stage, dtype, world_size).values())
    return not predicted <= held <= predicted + padding(stage, world_size)


def states_body() -> Measured:
    """On each rank."""
    return {dtype: [_held(stage, getattr(torch, dtype)) for stage in STAGES] for dtype in DTYPES}


def _held(stage: int, dtype: torch.dtype) -> int:
    """After a step, and the next one's backward."""
    known = baseline()
    model = MiniGPT().to(dtype)
    step = _whole(model) if stage == 0 else _sharded(model, stage)
    ids = torch.zeros(1, 4, dtype=torch.int64)
    for update in (True, False):
        model(ids).float().square().mean().backward()
        if update:
            step()
    counts = census(model, known)
    return counts["params"] + counts["grads"] + counts["optimizer"]


def _sharded(model: nn.Module, stage: int) -> Callable[[], None]:
    zero = ZeroOptimizer(model, *world(), stage=stage)

    def step() -> None:
        zero.step()
        zero.zero_grad()

    return step


def _whole(model: nn.Module) -> Callable[[], None]:
    """Data parallelism and torch's AdamW, over a float32 master copy where parameters are not that themselves."""
    wrapped = DistributedDataParallel(model, broadcast_buffers=False)
    params = list(model.parameters())
    masters = [p if p.dtype == torch.float32 else p.detach().float() for p in params]
    optimizer = torch.optim.AdamW(masters)

    def step() -> None:
        for master, p in zip(masters, params, strict=True):
            if master is not p and p.grad is not None:
                master.grad = p.grad.float()
        optimizer.step()
        for master, p in zip(masters, params, strict=True):
            if master is not p:
                p.data.copy_(master)
                master.grad = None
        wrapped.zero_grad(set_to_none=False)

    return step
