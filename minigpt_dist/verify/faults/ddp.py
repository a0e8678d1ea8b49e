"""Faults of the data-parallel wrapper: what it does not copy, does not average, or averages wrongly."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from minigpt_dist.verify.faults.catalogue import Names, fault
from minigpt_dist.verify.faults.wrapper import LessonDDP


@fault(
    source="TTrace T4 (arXiv 2506.09280)",
    needs="two ranks",
    check="ddp.plain",
    stage="reduce",
    step=1,
    rank=0,
    tensor="p0",
)
def ddp_sums_gradients() -> Names:
    """The wrapper sums gradients over ranks and does not divide."""

    class Wrapper(LessonDDP):
        def average(self, grad: Tensor) -> Tensor:
            return super().average(grad) * self.world_size

    return {"DistributedDataParallel": Wrapper}


@fault(
    source="a wrapper that forgets the start",
    needs="ranks seeded differently",
    check="ddp.plain",
    stage="broadcast",
    step=0,
    rank=1,
    tensor="p0",
)
def ddp_does_not_copy_parameters() -> Names:
    """Construction does not make the ranks equal."""

    class Wrapper(LessonDDP):
        def start(self) -> None:
            pass

    return {"DistributedDataParallel": Wrapper}


@fault(
    source="frozen parameters taken for constants that are equal anyway",
    needs="a frozen parameter",
    check="ddp.frozen",
    stage="broadcast",
    step=0,
    rank=1,
    tensor="p1",
    green=("ddp.plain",),
)
def ddp_does_not_copy_frozen_parameters() -> Names:
    """Only parameters that require a gradient are copied at construction."""

    class Wrapper(LessonDDP):
        def start(self) -> None:
            for p in self.module.parameters():
                if p.requires_grad:
                    whole = p.detach().contiguous()
                    dist.broadcast(whole, src=0)
                    p.detach().copy_(whole)

    return {"DistributedDataParallel": Wrapper}


@fault(
    source="bucket_cap_mb and the last, half-full bucket",
    needs="more than one bucket",
    check="ddp.buckets",
    stage="reduce",
    step=1,
    rank=0,
    green=("ddp.plain",),
)
def ddp_never_sends_its_last_bucket() -> Names:
    """Gradients wait until a bucket of six is full; what is left over at the end is never sent."""

    class Wrapper(LessonDDP):
        def sync_grads(self) -> None:
            waiting: list[nn.Parameter] = []
            for p in self.module.parameters():
                waiting.append(p)
                if len(waiting) == 6:
                    for q in waiting:
                        q.grad = self.average(torch.zeros_like(q) if q.grad is None else q.grad)
                    waiting = []

    return {"DistributedDataParallel": Wrapper}


@fault(
    source="allenai/open-instruct#1498",
    needs="two backwards",
    check="ddp.backwards",
    stage="reduce",
    step=1,
    rank=0,
    tensor="p0",
    green=("ddp.plain",),
)
def ddp_keeps_the_last_backward_only() -> Names:
    """A hook drops what earlier backwards left, so that only the last one is averaged."""

    class Wrapper(LessonDDP):
        def start(self) -> None:
            super().start()
            for p in self.module.parameters():
                if p.requires_grad:
                    p.register_hook(lambda grad, p=p: setattr(p, "grad", None))

    return {"DistributedDataParallel": Wrapper}


@fault(
    source="gradients copied through float32 buckets",
    needs="float64 parameters",
    check="ddp.float64",
    stage="reduce",
    step=1,
    rank=0,
    tensor="p0",
    green=("ddp.plain",),
)
def ddp_averages_in_bfloat16_above_float32() -> Names:
    """Gradients of float64 parameters travel in bfloat16, as a compression hook does."""

    class Wrapper(LessonDDP):
        def average(self, grad: Tensor) -> Tensor:
            return super().average(grad.bfloat16().to(grad.dtype) if grad.dtype is torch.float64 else grad)

    return {"DistributedDataParallel": Wrapper}


@fault(
    source="flattening views in memory order",
    needs="a parameter that is not contiguous",
    check="ddp.transposed",
    stage="reduce",
    step=1,
    rank=0,
    tensor="p0",
    green=("ddp.plain",),
)
def ddp_flattens_in_memory_order() -> Names:
    """A bucket is filled in memory order and read back in index order."""

    class Wrapper(LessonDDP):
        def average(self, grad: Tensor) -> Tensor:
            straight = grad.t() if grad.dim() == 2 and not grad.is_contiguous() else grad
            return super().average(straight).flatten().view(grad.shape)

    return {"DistributedDataParallel": Wrapper}


@fault(
    source="bucket caps in elements",
    needs="a tensor of more than 65,536 elements",
    check="ddp.large",
    stage="reduce",
    step=1,
    rank=0,
    tensor="p0",
    green=("ddp.plain",),
)
def ddp_sends_only_the_first_piece() -> Names:
    """Of a gradient, the first 65,536 elements are averaged."""

    class Wrapper(LessonDDP):
        def average(self, grad: Tensor) -> Tensor:
            whole = grad.contiguous().clone().flatten()
            whole[:65_536] = super().average(whole[:65_536].clone())
            return whole.view(grad.shape)

    return {"DistributedDataParallel": Wrapper}


@fault(
    source="NVIDIA/Megatron-LM#656, tied weights reduced once for each name",
    needs="a tied parameter",
    check="ddp.tied",
    stage="reduce",
    step=1,
    rank=0,
    tensor="p0",
    green=("ddp.plain",),
)
def ddp_sums_tied_parameters_twice() -> Names:
    """Gradients are summed name by name and divided once: a tensor with two names is summed twice."""

    class Wrapper(LessonDDP):
        def sync_grads(self) -> None:
            named = [p for p in self.module.state_dict(keep_vars=True).values() if isinstance(p, nn.Parameter)]
            for p in (p for p in named if p.requires_grad):
                p.grad = self.average(torch.zeros_like(p) if p.grad is None else p.grad) * self.world_size
            for p in self.module.parameters():
                if p.grad is not None:
                    p.grad = p.grad / self.world_size

    return {"DistributedDataParallel": Wrapper}


@fault(
    source="pytorch/pytorch#128949, the silent form",
    needs="a parameter without a gradient",
    check="ddp.unused",
    stage="reduce",
    step=1,
    rank=0,
    green=("ddp.plain",),
)
def ddp_stops_at_an_unused_parameter() -> Names:
    """Gradients are averaged in the order in which they come; one that never comes stops all after it."""

    class Wrapper(LessonDDP):
        def sync_grads(self) -> None:
            for p in self.module.parameters():
                if p.grad is None:
                    return
                p.grad = self.average(p.grad)

    return {"DistributedDataParallel": Wrapper}


@fault(
    source="buckets laid out after the first backward (torch DDP rebuilds its buckets then)",
    needs="a parameter idle at first steps",
    check="ddp.unused_once",
    stage="reduce",
    step=3,
    rank=0,
    tensor="p2",
    green=("ddp.plain", "ddp.unused"),
)
def ddp_knows_the_parameters_of_the_first_step() -> Names:
    """What has a gradient after the first backward is averaged from then on; the rest never is."""

    class Wrapper(LessonDDP):
        def sync_grads(self) -> None:
            if not hasattr(self, "known"):
                self.known = [p for p in self.module.parameters() if p.grad is not None]
            for p in self.known:
                p.grad = self.average(torch.zeros_like(p) if p.grad is None else p.grad)

    return {"DistributedDataParallel": Wrapper}
