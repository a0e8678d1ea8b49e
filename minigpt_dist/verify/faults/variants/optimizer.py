"""Correct variants of the sharded optimizer: when gradients are taken, whose Adam it is, who owns what."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from minigpt_dist.verify.faults import base
from minigpt_dist.verify.faults.catalogue import Names
from minigpt_dist.verify.faults.grouped import GroupedZero
from minigpt_dist.verify.faults.owning import FlatViewsZero, InnerAdamZero, WholeParameterZero
from minigpt_dist.verify.faults.variants.registry import variant


@variant
def hooks_take_gradients_early() -> Names:
    """A hook copies each gradient as soon as backward has accumulated it; step() sends the copies."""

    class Zero(base.LessonZero):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.taken: dict[Tensor, Tensor] = {}
            for p in self.params():
                p.register_post_accumulate_grad_hook(self._take)

        def _take(self, p: Tensor) -> None:
            if p.grad is not None:
                self.taken[p] = p.grad.clone()

        def flat_grads(self) -> Tensor:
            grads = [self.taken.pop(p, p.grad) for p in self.params()]
            return self.padded(
                [torch.zeros_like(p) if g is None else g for p, g in zip(self.params(), grads, strict=True)]
            )

    return {"ZeroOptimizer": Zero}


def _inner(kind: type[torch.optim.Adam], **options: Any) -> Names:
    class Zero(InnerAdamZero):
        def make(self, **given: Any) -> torch.optim.Adam:
            return kind([self.master], **given, **options)

    return {"ZeroOptimizer": Zero}


@variant
def torch_adamw_single() -> Names:
    """torch.optim.AdamW on the slice, one tensor at a time."""
    return _inner(torch.optim.AdamW, foreach=False)


@variant
def torch_adamw_foreach() -> Names:
    """torch.optim.AdamW on the slice, foreach."""
    return _inner(torch.optim.AdamW, foreach=True)


@variant
def torch_adamw_fused() -> Names:
    """torch.optim.AdamW on the slice, fused."""
    return _inner(torch.optim.AdamW, fused=True)


@variant
def torch_adam_with_l2_decay() -> Names:
    """torch.optim.Adam on the slice: weight decay is added to the gradient, as its documentation says."""
    return _inner(torch.optim.Adam)


@variant
def parameters_in_reverse() -> Names:
    """The flat vector holds the last parameter first."""

    class Zero(base.LessonZero):
        def params(self) -> Iterator[nn.Parameter]:
            return iter(list(super().params())[::-1])

    return {"ZeroOptimizer": Zero}


@variant
def parameters_are_views() -> Names:
    """Parameters are views of one flat buffer; gathering fills them."""
    return {"ZeroOptimizer": FlatViewsZero}


@variant
def slices_of_every_parameter() -> Names:
    """Each parameter is cut over the ranks by itself, in torch.optim.Optimizer's shape."""
    return {"ZeroOptimizer": GroupedZero}


@variant
def whole_parameters_have_owners() -> Names:
    """Each parameter has one owner, the rank with the least so far."""
    return {"ZeroOptimizer": WholeParameterZero}


@variant
def lesson_betas() -> Names:
    """The constructor takes beta1 and beta2, and the state has the lesson's names."""

    class Zero(base.LessonZero):
        def __init__(
            self,
            module: nn.Module,
            world_size: int,
            rank: int,
            lr: float = 1e-2,
            beta1: float = 0.9,
            beta2: float = 0.999,
            eps: float = 1e-8,
        ):
            super().__init__(module, world_size, rank, lr, (beta1, beta2), eps)

    return {"ZeroOptimizer": Zero}
