"""Correct variants of stages 2 and 3, recomputation and mixed precision: other messages, no autograd, other hooks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from minigpt_dist.verify.faults.catalogue import Names
from minigpt_dist.verify.faults.scaled import ScaledAdam
from minigpt_dist.verify.faults.sharding import LessonZero2, LessonZero3
from minigpt_dist.verify.faults.variants.registry import variant


@variant
def gradients_leave_in_one_message() -> Names:
    """Stage 2 without buckets: all gradients of a backward leave at its end, in one message."""

    class Late(LessonZero2):
        def __init__(
            self, module: nn.Module, world_size: int, rank: int, lr: float, betas: Any, eps: float, weight_decay: float
        ) -> None:
            options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
            super().__init__(module, world_size, rank, **options)
            self.waiting = False

        def arrived(self, p: Tensor) -> None:
            if not self.waiting:
                self.waiting = True
                torch.autograd.Variable._execution_engine.queue_callback(self.ended)

        @torch.no_grad()
        def ended(self) -> None:
            self.waiting = False
            if self.world_size == 1:
                self.sums += self.flat_grads()
            else:
                parts = torch.empty_like(self.master)
                dist.reduce_scatter_tensor(parts, self.flat_grads())
                self.sums += parts
            for p in self.params():
                p.grad = None

    return {"Zero2Optimizer": Late}


@variant
def pieces_are_broadcast_by_their_owners() -> Names:
    """Stage 3: each rank that has a piece of a parameter sends it to all others."""

    class Sent(LessonZero3):
        def gathered_value(self, p: Tensor) -> Tensor:
            whole, start = torch.zeros(p.numel()), self.place[p]
            here, there = self.part(p)
            whole[here] = self.master[there] if here.start < here.stop else whole[here]
            for owner in range(self.world_size):
                lo, hi = (min(max(r * self.chunk - start, 0), p.numel()) for r in (owner, owner + 1))
                if lo < hi and self.world_size > 1:
                    dist.broadcast(whole[lo:hi], src=owner)
            return whole

    return {"Zero3Optimizer": Sent}


@variant
def recompute_by_torch() -> Names:
    """torch.utils.checkpoint, with buffers put back."""

    def recompute(block: nn.Module, *args: Any) -> Tensor:
        before = [b.clone() for b in block.buffers()]
        runs = [0]

        def run(*given: Any) -> Tensor:
            runs[0] += 1
            now = [b.clone() for b in block.buffers()]
            if runs[0] > 1:
                _set(block, before)
            out: Tensor = block(*given)
            if runs[0] > 1:
                _set(block, now)
            return out

        kept: Tensor = checkpoint(run, *args, use_reentrant=False)
        return kept

    return {"recompute": recompute}


@torch.no_grad()
def _set(block: nn.Module, values: list[Tensor]) -> None:
    for buffer, value in zip(block.buffers(), values, strict=True):
        buffer.copy_(value)


@variant
def overflow_is_seen_in_the_sum() -> Names:
    """Whether all ranks are finite is read from the sum of gradients, which all of them have."""

    class Late(ScaledAdam):
        def step(self) -> bool:
            grad = self.unscale(self.mean(self.gradient()))
            if good := bool(torch.isfinite(grad).all()):
                self.update(self.clip(grad))
                self.cast()
            self.rescale(good)
            return good

    return {"MixedPrecisionOptimizer": Late}
