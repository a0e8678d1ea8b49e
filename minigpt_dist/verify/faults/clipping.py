"""Faults of clipping: whose norm, of what, and whether anything is scaled at all."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from minigpt_dist.verify.faults.catalogue import Names, fault
from minigpt_dist.verify.faults.grouped import GroupedZero, Pairs

GREEN = ("optimizer.plain", "optimizer.clip_idle")


@fault(
    source="huggingface/transformers#46113",
    needs="a norm above the limit",
    check="optimizer.clip",
    stage="clip",
    step=1,
    tensor="p0",
    green=GREEN,
)
def clip_computes_but_never_scales() -> Names:
    """The norm is right, and the factor is applied to a copy."""

    class Zero(GroupedZero):
        def clip(self, pairs: Pairs) -> Pairs:
            super().clip(pairs)
            return pairs

    return {"ZeroOptimizer": Zero}


@fault(
    source="clip_grad_norm_ on a sharded gradient (NVIDIA/apex, fairscale)",
    needs="a norm above the limit, two ranks",
    check="optimizer.clip",
    stage="clip",
    step=1,
    tensor="p0",
    green=GREEN,
    equivalent=((1, "one slice is the whole"),),
)
def clip_by_the_norm_of_the_own_slice() -> Names:
    """Each rank scales by the norm of the slice it owns."""

    class Zero(GroupedZero):
        def total_norm(self, pairs: Pairs) -> Tensor:
            return torch.stack([g.double().square().sum() for _, g in pairs]).sum().sqrt()

    return {"ZeroOptimizer": Zero}


@fault(
    source="clip_grad_norm_ before the reduction",
    needs="a norm above the limit, ranks whose gradients differ",
    check="optimizer.clip",
    stage="clip",
    step=1,
    tensor="p0",
    green=GREEN,
    equivalent=((1, "one rank's gradient is the mean"),),
)
def clip_before_the_mean() -> Names:
    """Each rank clips its own gradient, and the clipped ones are averaged."""

    class Zero(GroupedZero):
        def mean(self, p: nn.Parameter) -> Tensor:
            if self.max_norm is not None and not hasattr(self, "_busy"):
                grads = [q.grad for _, q in self.members() if q.grad is not None]
                torch.nn.utils.get_total_norm(grads)
                scale = min(
                    self.max_norm / (float(torch.stack([g.square().sum() for g in grads]).sum().sqrt()) + 1e-6), 1.0
                )
                for g in grads:
                    g.mul_(scale)
                self._busy = True
            return super().mean(p)

        def clip(self, pairs: Pairs) -> Pairs:
            self.__dict__.pop("_busy", None)
            return pairs

    return {"ZeroOptimizer": Zero}


@fault(
    source="a norm for each parameter",
    needs="several tensors, a norm above the limit",
    check="optimizer.clip",
    stage="clip",
    step=1,
    tensor="p0",
    green=GREEN,
)
def clip_tensor_by_tensor() -> Names:
    """Each tensor is scaled by its own norm."""

    class Zero(GroupedZero):
        def clip(self, pairs: Pairs) -> Pairs:
            return [pair for each in pairs for pair in super(Zero, self).clip([each])]

    return {"ZeroOptimizer": Zero}


@fault(
    source="the root forgotten in a hand-written norm",
    needs="a norm above the limit",
    check="optimizer.clip",
    stage="clip",
    step=1,
    tensor="p0",
    green=GREEN,
)
def clip_by_the_squared_norm() -> Names:
    """The square root of the sum of squares is not taken."""

    class Zero(GroupedZero):
        def total_norm(self, pairs: Pairs) -> Tensor:
            return super().total_norm(pairs).square()

    return {"ZeroOptimizer": Zero}


@fault(
    source="the factor without its upper bound of one",
    needs="a norm below the limit",
    check="optimizer.clip_idle",
    stage="clip",
    step=1,
    tensor="p0",
    green=("optimizer.plain", "optimizer.clip"),
)
def clip_scales_small_gradients_up() -> Names:
    """The gradient is scaled to the limit even where its norm is below it."""

    class Zero(GroupedZero):
        def clip(self, pairs: Pairs) -> Pairs:
            if self.max_norm is None:
                return pairs
            scale = self.max_norm / (float(self.total_norm(pairs)) + 1e-6)
            return [(p, g * scale) for p, g in pairs]

    return {"ZeroOptimizer": Zero}


@fault(
    source="deepspeedai/DeepSpeed#7807",
    needs="a norm above the limit, a tensor that spans two ranks",
    check="optimizer.clip",
    stage="clip",
    step=1,
    tensor="p0",
    green=GREEN,
    equivalent=((1, "no tensor is cut"),),
)
def cross_boundary_tensor_half_reduced() -> Names:
    """The norm is taken of reduced values in the own slice and of raw, local gradients elsewhere."""

    class Zero(GroupedZero):
        def total_norm(self, pairs: Pairs) -> Tensor:
            own = torch.stack([g.double().square().sum() for _, g in pairs]).sum()
            local = torch.stack([p.grad.double().square().sum() for p, _ in pairs if p.grad is not None]).sum()
            raw = torch.stack([self.cut(p.grad).double().square().sum() for p, _ in pairs if p.grad is not None]).sum()
            return (own + local - raw).sqrt()

    return {"ZeroOptimizer": Zero}


@fault(
    source="TrainCheck C4, deepspeedai/DeepSpeed#1801 (BLOOM-176B)",
    needs="a norm above the limit, two ranks",
    check="optimizer.clip",
    stage="clip",
    step=1,
    tensor="p0",
    green=GREEN,
    equivalent=((1, "rank 0 is the only one"),),
)
def clip_on_rank_0_only() -> Names:
    """Only rank 0 scales its slice."""

    class Zero(GroupedZero):
        def clip(self, pairs: Pairs) -> Pairs:
            clipped = super().clip(pairs)
            return clipped if self.rank == 0 else pairs

    return {"ZeroOptimizer": Zero}


@fault(
    source="ROCm/TransformerEngine#715, replicas counted once a rank",
    needs="a norm above the limit, two ranks",
    check="optimizer.clip",
    stage="clip",
    step=1,
    tensor="p0",
    green=GREEN,
    equivalent=((1, "one replica is counted once"),),
)
def replicated_weights_overcounted() -> Names:
    """Every rank adds the squares of the whole gradient, so that each element counts N times."""

    class Zero(GroupedZero):
        def total_norm(self, pairs: Pairs) -> Tensor:
            square = super().total_norm(pairs).square()
            if self.world_size > 1:
                dist.all_reduce(square)
            return square.sqrt()

    return {"ZeroOptimizer": Zero}
