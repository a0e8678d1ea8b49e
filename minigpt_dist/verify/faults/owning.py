"""Three more correct ways to own a shard: torch's Adam on the slice, parameters as views, whole parameters."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from minigpt_dist.verify.faults.base import LessonZero


class InnerAdamZero(LessonZero):
    """The slice is a parameter of a torch optimizer, which holds the moments and counts the steps."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.inner = self.make(lr=self.lr, betas=self.betas, eps=self.eps, weight_decay=self.weight_decay)
        del self.exp_avg, self.exp_avg_sq

    def make(self, **given: Any) -> torch.optim.Adam:
        raise NotImplementedError

    def update(self, grad: Tensor) -> None:
        self.inner.param_groups[0]["lr"] = self.lr
        self.master.grad = grad
        self.inner.step()
        self.master.grad = None

    def state_dict(self) -> dict[str, Any]:
        moments = self.inner.state[self.master]
        named = {name: value.clone() for name, value in moments.items()}
        return {"master": self.master.clone(), **named, "lr": self.lr}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.master.copy_(state["master"])
        self.lr = state["lr"]
        self.inner.state[self.master] = {
            name: state[name].clone() for name in ("step", "exp_avg", "exp_avg_sq") if name in state
        }


class FlatViewsZero(LessonZero):
    """Parameters are views of one flat buffer, which is what is gathered into."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        dtype = next((p.dtype for p in self.params()), torch.float32)
        self.buffer = self.flat_params().to(dtype)
        offset = 0
        for p in self.params():
            p.data = self.buffer[offset : offset + p.numel()].view(p.shape)
            offset += p.numel()

    def write_back(self, flat: Tensor) -> None:
        self.buffer.copy_(flat)


class WholeParameterZero:
    """Each parameter belongs to the rank that owns the fewest elements so far; its owner keeps a master copy and sends the result."""

    def __init__(
        self,
        module: nn.Module,
        world_size: int,
        rank: int,
        lr: float = 1e-2,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        self.world_size, self.rank, self.module = world_size, rank, module
        self.params = [p for p in module.parameters() if p.requires_grad]
        held = [0] * world_size
        self.owners = [0] * len(self.params)
        for i in sorted(range(len(self.params)), key=lambda i: -self.params[i].numel()):
            self.owners[i] = min(range(world_size), key=lambda r: held[r])
            held[self.owners[i]] += self.params[i].numel()
        self.mine = {i: p.detach().float().clone() for i, p in enumerate(self.params) if self.owners[i] == rank}
        self.param_groups = [{"lr": lr}]
        self.inner = (
            torch.optim.AdamW(self.mine.values(), lr=lr, betas=betas, eps=eps, weight_decay=0.0) if self.mine else None
        )

    def zero_grad(self) -> None:
        self.module.zero_grad()

    @torch.no_grad()
    def step(self) -> None:
        for i, p in enumerate(self.params):
            grad = torch.zeros_like(p).contiguous() if p.grad is None else p.grad.contiguous().clone()
            if self.world_size > 1:
                dist.reduce(grad, dst=self.owners[i])
            if i in self.mine:
                self.mine[i].grad = grad.float() / self.world_size
        if self.inner is not None:
            self.inner.param_groups[0]["lr"] = self.param_groups[0]["lr"]
            self.inner.step()
        for i, p in enumerate(self.params):
            whole = (
                self.mine[i].to(p.dtype).contiguous()
                if i in self.mine
                else torch.empty_like(p, memory_format=torch.contiguous_format)
            )
            if self.world_size > 1:
                dist.broadcast(whole, src=self.owners[i])
            p.copy_(whole)
        for master in self.mine.values():
            master.grad = None

    def state_dict(self) -> dict[str, Any]:
        inner = self.inner.state if self.inner is not None else {}
        moments = {
            str(i): {k: v.clone() for k, v in inner.get(m, {}).items()} | {"master": m.clone()}
            for i, m in self.mine.items()
        }
        return {"owned": moments, "lr": self.param_groups[0]["lr"]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.param_groups[0]["lr"] = state["lr"]
        for i, master in self.mine.items():
            saved = state["owned"][str(i)]
            master.copy_(saved["master"])
            if self.inner is not None:
                self.inner.state[master] = {k: v.clone() for k, v in saved.items() if k != "master"}
