"""A tenth host for faults: correct mixed-precision training, Adam on a whole float32 copy on every rank. It shares no code with
`parallel/precision.py`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class ScaledAdam:
    """step() = average, unscale, agree, clip, update, cast."""

    def __init__(
        self,
        module: nn.Module,
        world_size: int,
        rank: int,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        max_norm: float | None = None,
        init_scale: float = 2.0**16,
        growth_interval: int = 2000,
    ) -> None:
        self.params, self.world_size, self.rank = list(module.parameters()), world_size, rank
        self.master = nn.Parameter(self.flat([p.detach() for p in self.params]))
        self.adam = torch.optim.AdamW([self.master], lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        self.max_norm, self.scale, self.interval, self.clean = max_norm, init_scale, growth_interval, 0

    def flat(self, tensors: list[Tensor]) -> Tensor:
        return torch.cat([t.float().flatten() for t in tensors])

    def backward(self, loss: Tensor) -> None:
        (loss * self.scale).backward()

    def gradient(self) -> Tensor:
        """This rank's own, in float32."""
        return self.flat([torch.zeros_like(p) if p.grad is None else p.grad for p in self.params])

    def mean(self, grad: Tensor) -> Tensor:
        total = grad.clone()
        dist.all_reduce(total)
        return total / self.world_size

    def finite(self, grad: Tensor) -> bool:
        """On all ranks?"""
        bad = torch.tensor(float(not torch.isfinite(grad).all()))
        dist.all_reduce(bad)
        return float(bad) == 0

    def unscale(self, grad: Tensor) -> Tensor:
        return grad / self.scale

    def clip(self, grad: Tensor) -> Tensor:
        return grad if self.max_norm is None else grad * min(1.0, self.max_norm / (float(grad.norm()) + 1e-6))

    def update(self, grad: Tensor) -> None:
        self.master.grad = grad
        self.adam.step()

    @torch.no_grad()
    def cast(self) -> None:
        for p, part in zip(self.params, self.master.split([p.numel() for p in self.params]), strict=True):
            p.copy_(part.view(p.shape))

    def rescale(self, finite: bool) -> None:
        self.clean = self.clean + 1 if finite else 0
        if not finite:
            self.scale /= 2
        elif self.clean == self.interval:
            self.scale, self.clean = self.scale * 2, 0

    def prepared(self, own: Tensor) -> Tensor:
        return self.clip(self.unscale(self.mean(own)))

    def step(self) -> bool:
        own = self.gradient()
        if good := self.finite(own):
            self.update(self.prepared(own))
            self.cast()
        self.rescale(good)
        return good

    def zero_grad(self) -> None:
        for p in self.params:
            p.grad = None

    def state_dict(self) -> dict[str, Any]:
        moments = {name: value.clone() for name, value in self.adam.state[self.master].items()}
        return {"master": self.master.detach().clone(), "moments": moments, "scale": self.scale, "clean": self.clean}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.master.copy_(state["master"])
        self.adam.state[self.master] = {name: value.clone() for name, value in state["moments"].items()}
        self.scale, self.clean = state["scale"], state["clean"]


NAMES = {"MixedPrecisionOptimizer": ScaledAdam}
