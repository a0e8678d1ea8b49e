"""The seventh host where a sequence is cut over the ranks of a layer: its norm, its gathers, and clipping over all of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from minigpt_dist.verify.faults.layers import cut, pair, total


class Norm(nn.Module):
    """Hooks sum the gradients of weight and bias over the ranks of the sequence."""

    def __init__(self, weight: Tensor, bias: Tensor, world_size: int, rank: int, group: Any = None) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(weight.clone()), nn.Parameter(bias.clone())
        self.group, self.world_size = group, world_size
        for p in (self.weight, self.bias):
            p.register_hook(self.shared)

    def shared(self, grad: Tensor) -> Tensor:
        return total(grad, self.group)

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias)


def ranks() -> tuple[int, int]:
    """(world size, rank)."""
    return (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)


def joined(x: Tensor) -> Tensor:
    """All ranks' positions in order."""
    if not dist.is_initialized():
        return x.clone()
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(ranks()[0])]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts, 1)


def own(x: Tensor) -> Tensor:
    """This rank's positions."""
    return cut(x, ranks()[1], ranks()[0], 1)


def gather_sequence(x: Tensor) -> Tensor:
    return pair(x, joined, lambda grad: own(total(grad)))


def scatter_sequence(x: Tensor) -> Tensor:
    return pair(x, lambda x: own(total(x)), joined)


class Clip:
    """The norm and what is done with it, a step a method."""

    def squares(self, params: list[nn.Parameter]) -> Tensor:
        return sum((p.grad.square().sum() for p in params if p.grad is not None), torch.zeros((), dtype=torch.float64))

    def norm(self, sharded: list[nn.Parameter], replicated: list[nn.Parameter]) -> float:
        return float((total(self.squares(sharded)) + self.squares(replicated)).sqrt())

    def scale(self, norm: float, max_norm: float) -> float:
        return min(1.0, max_norm / norm) if norm else 1.0

    def __call__(self, sharded: Iterable[nn.Parameter], replicated: Iterable[nn.Parameter], max_norm: float) -> float:
        cut, whole = list(sharded), list(replicated)
        norm = self.norm(cut, whole)
        for p in (*cut, *whole):
            if p.grad is not None:
                p.grad.mul_(self.scale(norm, max_norm))
        return norm


NAMES = {
    "SequenceLayerNorm": Norm,
    "gather_sequence": gather_sequence,
    "scatter_sequence": scatter_sequence,
    "clip_sharded_grad_norm": Clip(),
}
