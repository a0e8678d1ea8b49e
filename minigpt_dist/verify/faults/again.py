"""A ninth host for faults: correct recomputation, a step a method. It shares no code with `parallel/recompute.py`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn


class Again:
    """One block's run; its steps are methods."""

    def __init__(self, block: nn.Module, args: tuple[Any, ...]) -> None:
        self.block, self.args = block, args
        self.stream = torch.get_rng_state()
        self.cast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")

    def remember(self) -> list[Tensor]:
        """Tensors to keep until backward, of which the arguments are the first."""
        return [*self.tensors(), *(buffer.clone() for buffer in self.block.buffers())]

    def tensors(self) -> list[Tensor]:
        return [a for a in self.args if isinstance(a, Tensor)]

    def arguments(self, tensors: list[Tensor]) -> list[Any]:
        """The arguments for the second run, tensors that may want gradients among them."""
        left = iter(tensors)
        return [next(left) if isinstance(a, Tensor) else a for a in self.shape]

    def forget(self) -> None:
        """Keep no argument that is a tensor: those are saved."""
        self.shape = [torch.empty(0) if isinstance(a, Tensor) else a for a in self.args]
        self.args = ()

    def casting(self) -> AbstractContextManager[Any]:
        return torch.autocast("cpu", self.cast[1], enabled=self.cast[0])

    def rewound(self) -> AbstractContextManager[Any]:
        """Inside, the random stream is the first run's."""
        return torch.random.fork_rng([])

    def set_stream(self) -> None:
        torch.set_rng_state(self.stream)

    def set_buffers(self, values: list[Tensor]) -> None:
        with torch.no_grad():
            for buffer, value in zip(self.block.buffers(), values, strict=True):
                buffer.copy_(value)

    def run(self, arguments: list[Any], then: list[Tensor]) -> Tensor:
        """The second run."""
        now = [buffer.clone() for buffer in self.block.buffers()]
        with torch.enable_grad(), self.casting(), self.rewound():
            self.set_stream()
            self.set_buffers(then)
            out: Tensor = self.block(*arguments)
        self.set_buffers(now)
        return out

    def trained(self) -> list[nn.Parameter]:
        return [p for p in self.block.parameters() if p.requires_grad]


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: Again, *inputs: Tensor) -> Tensor:
        ctx.plan, ctx.count = plan, len(plan.tensors())
        ctx.save_for_backward(*plan.remember())
        out: Tensor = plan.block(*plan.args)
        plan.forget()
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        plan, saved = ctx.plan, list(ctx.saved_tensors)
        needs = ctx.needs_input_grad[1 : 1 + ctx.count]
        tensors = [t.detach().requires_grad_(need) for t, need in zip(saved[: ctx.count], needs, strict=True)]
        out = plan.run(plan.arguments(tensors), saved[ctx.count :])
        wanted = [t for t in tensors if t.requires_grad] + plan.trained()
        found = list(torch.autograd.grad(out, wanted, grads[0], allow_unused=True))
        given = [found.pop(0) if t.requires_grad else None for t in tensors]
        return None, *given, *found


def recompute_with(kind: type[Again]) -> Callable[..., Tensor]:
    """The contract's function, of a class with its steps."""

    def recompute(block: nn.Module, *args: Any) -> Tensor:
        plan = kind(block, args)
        if not torch.is_grad_enabled():
            out: Tensor = block(*args)
            return out
        node: Tensor = _Node.apply(plan, *plan.tensors(), *plan.trained())  # type: ignore[no-untyped-call]  # torch's
        return node

    return recompute


NAMES = {"recompute": recompute_with(Again)}
