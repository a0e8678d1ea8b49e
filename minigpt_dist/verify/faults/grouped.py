"""A second host for faults: a correct ZeRO-1 in the shape of `torch.optim.Optimizer`, with parameter groups, closures and clipping.

Owns a way to shard that neither `base.py` nor `parallel/` has: each tensor is cut over the ranks by itself. The judge must pass it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

Pairs = list[tuple[nn.Parameter, Tensor]]


class GroupedZero(torch.optim.Optimizer):
    """AdamW on this rank's slice of every parameter, whose state is {master, exp_avg, exp_avg_sq, step}."""

    def __init__(
        self,
        module: Any,
        world_size: int,
        rank: int,
        lr: float = 1e-2,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        max_norm: float | None = None,
    ) -> None:
        self.world_size, self.rank, self.max_norm = world_size, rank, max_norm
        params = module.parameters() if isinstance(module, nn.Module) else module
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def members(self) -> Iterator[tuple[dict[str, Any], nn.Parameter]]:
        """Every trainable parameter with its group."""
        return ((group, p) for group in self.param_groups for p in group["params"] if p.requires_grad)

    def cut(self, tensor: Tensor) -> Tensor:
        """This rank's slice of one tensor, padded to the length that all slices have."""
        chunk = -(-tensor.numel() // self.world_size)
        flat = F.pad(tensor.detach().float().flatten(), (0, chunk * self.world_size - tensor.numel()))
        return flat[self.rank * chunk : (self.rank + 1) * chunk].clone()

    def mean(self, p: nn.Parameter) -> Tensor:
        """This rank's slice of the gradient's mean over ranks; zeros count for a rank without one."""
        grad = (
            torch.zeros_like(p, memory_format=torch.contiguous_format)
            if p.grad is None
            else p.grad.contiguous().clone()
        )
        if self.world_size > 1:
            dist.all_reduce(grad)
        return self.cut(grad) / self.world_size

    def total_norm(self, pairs: Pairs) -> Tensor:
        """2-norm of the mean gradient over all ranks' slices."""
        square = torch.stack([g.double().square().sum() for _, g in pairs]).sum()
        if self.world_size > 1:
            dist.all_reduce(square)
        return square.sqrt()

    def clip(self, pairs: Pairs) -> Pairs:
        if self.max_norm is None:
            return pairs
        scale = min(self.max_norm / (float(self.total_norm(pairs)) + 1e-6), 1.0)
        return [(p, g * scale) for p, g in pairs]

    def slot(self, p: nn.Parameter) -> dict[str, Any]:
        """The state of one parameter, made when it is first needed."""
        if not self.state[p]:
            master = self.cut(p)
            self.state[p] = {
                "master": master,
                "exp_avg": torch.zeros_like(master),
                "exp_avg_sq": torch.zeros_like(master),
                "step": 0,
            }
        state: dict[str, Any] = self.state[p]
        return state

    def update(self, p: nn.Parameter, grad: Tensor, group: dict[str, Any]) -> None:
        state = self.slot(p)
        state["step"] += 1
        beta1, beta2 = group["betas"]
        state["master"].mul_(1 - group["lr"] * group["weight_decay"])
        state["exp_avg"].lerp_(grad, 1 - beta1)
        state["exp_avg_sq"].lerp_(grad * grad, 1 - beta2)
        first, second = (
            state["exp_avg"] / (1 - beta1 ** state["step"]),
            state["exp_avg_sq"] / (1 - beta2 ** state["step"]),
        )
        state["master"].sub_(group["lr"] * first / (second.sqrt() + group["eps"]))

    def gather(self, p: nn.Parameter) -> None:
        whole = [torch.empty_like(self.state[p]["master"]) for _ in range(self.world_size)]
        if self.world_size > 1:
            dist.all_gather(whole, self.state[p]["master"])
        else:
            whole = [self.state[p]["master"]]
        p.detach().copy_(torch.cat(whole)[: p.numel()].view(p.shape))

    def evaluate(self, closure: Callable[[], float] | None) -> float | None:
        if closure is None:
            return None
        with torch.enable_grad():
            return closure()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]  # torch's overloads
        loss = self.evaluate(closure)
        group_of = {p: group for group, p in self.members()}
        for p, grad in self.clip([(p, self.mean(p)) for p in group_of]):
            self.update(p, grad, group_of[p])
            self.gather(p)
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Torch's own form: state by number of the parameter, and the groups' options."""
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's; the numbers of parameters come back from a file as text."""
        state = {int(key): value for key, value in state_dict["state"].items()}
        super().load_state_dict({"state": state, "param_groups": state_dict["param_groups"]})
