"""A model with everything that ZeRO stages must tell apart, its training on a rank, and the world sizes to train it at."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from minigpt_dist import ZeroOptimizer
from minigpt_dist.model import Block
from minigpt_dist.parallel.collectives import world
from minigpt_dist.trace import digest, state_digests

QUICK = (3,)  # which exercises padding
SIZES = [N if N in QUICK else pytest.param(N, marks=pytest.mark.slow) for N in (1, 2, 3, 4, 8)]
BUCKET_MB = 2e-3  # a bucket for every few parameters of these models


class Odd(nn.Module):
    """Blocks, a tied weight, a frozen layer that is used, one that never is, one that is at odd steps, a parameter of the root's own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(12, 8)
        self.frozen, self.unused, self.odd = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.frozen.requires_grad_(False)
        self.blocks = nn.ModuleList(Block(8, 2) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(8))
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, use_odd: bool) -> Tensor:
        x = self.frozen(self.embed(ids))
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head((self.odd(x) if use_odd else x) * self.scale)
        return out


def backward(model: nn.Module, step: int, micro: int, use_odd: bool) -> float:
    """One micro-batch of this rank's own."""
    draw = torch.Generator().manual_seed(step * 100 + world()[1] * 10 + micro)
    ids = torch.randint(0, 12, (3, 5), generator=draw)
    loss = nn.functional.cross_entropy(model(ids, use_odd).flatten(0, 1).float(), ids.flatten())
    loss.backward()
    return loss.item()


def train(model: nn.Module, zero: ZeroOptimizer, steps: range, micros: int = 1, odd_ranks: str = "all") -> list[Any]:
    """Per step: the losses, and digests of parameters and of the optimizer's state."""
    seen = []
    for step in steps:
        zero.zero_grad()
        use_odd = step % 2 == 1 and (odd_ranks == "all" or world()[1] == 0)
        losses = []
        for m in range(micros):
            with zero.no_sync() if m < micros - 1 else nullcontext():
                losses.append(backward(model, step, m, use_odd))
            zero.fold()
        zero.step()
        with zero.gathered():
            named = {name: digest(p) for name, p in model.named_parameters()}
        seen.append([losses, named, state_digests(zero.state_dict())])
    return seen


def build(stage: int, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[nn.Module, ZeroOptimizer]:
    model, N, rank = Odd().to(dtype), world()[0], world()[1]
    return model, ZeroOptimizer(model, N, rank, lr=1e-2, stage=stage, bucket_mb=BUCKET_MB, **options)
