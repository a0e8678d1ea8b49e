"""A third host for faults: a correct data-parallel wrapper that averages gradients by hooks, tensor by tensor."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from minigpt_dist.verify.faults import base


class LessonDDP(nn.Module):
    """Rank 0's parameters everywhere at construction; `sync_grads()` after backward leaves the mean gradient in p.grad."""

    def __init__(self, module: nn.Module, world_size: int) -> None:
        super().__init__()
        self.module, self.world_size = module, world_size
        self.start()

    def start(self) -> None:
        base.broadcast_parameters(self.module)

    def forward(self, *args: Any, **options: Any) -> Any:
        return self.module(*args, **options)

    def average(self, grad: Tensor) -> Tensor:
        whole = grad.contiguous()
        if self.world_size > 1:
            dist.all_reduce(whole)
        return whole / self.world_size

    def sync_grads(self) -> None:
        for p in self.module.parameters():
            if p.requires_grad:
                p.grad = self.average(torch.zeros_like(p) if p.grad is None else p.grad)
