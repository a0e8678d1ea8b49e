"""Faults between backward and the reduction: gradients kept, lost, counted twice, or taken from the wrong place."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from minigpt_dist.verify.faults.base import LessonZero
from minigpt_dist.verify.faults.catalogue import Names, fault


@fault(
    source="tenstorrent/tt-blacksmith#711",
    needs="two steps",
    check="optimizer.plain",
    stage="backward",
    step=2,
    tensor="p0",
    green=("param_norms",),
)
def zero_grad_forgotten() -> Names:
    """zero_grad does nothing: each update uses the sum of all gradients so far."""

    class Zero(LessonZero):
        def zero_grad(self) -> None:
            pass

    return {"ZeroOptimizer": Zero}


@fault(
    source="tenstorrent/tt-blacksmith#711, for owned parameters only",
    needs="two steps, a parameter that the rank does not own",
    check="optimizer.plain",
    stage="backward",
    step=2,
    tensor="p1",
    equivalent=((1, "one rank owns everything"),),
)
def zero_grad_clears_owned_parameters_only() -> Names:
    """Each rank clears the gradients of the parameters in its slice; the others keep adding up there."""

    class Zero(LessonZero):
        def zero_grad(self) -> None:
            offset, lo = 0, self.rank * self.chunk
            for p in self.params():
                if offset < lo + self.chunk and offset + p.numel() > lo:
                    p.grad = None
                offset += p.numel()

    return {"ZeroOptimizer": Zero}


@fault(
    source="allenai/open-instruct#1498",
    needs="two backwards before a step",
    check="optimizer.backwards",
    stage="reduce",
    step=1,
    tensor="p0",
    green=("optimizer.plain",),
)
def only_last_microbatch_survives() -> Names:
    """A hook reduces at each backward and keeps only what it got last."""

    class Zero(LessonZero):
        def __init__(self, *args: object, **options: object) -> None:
            super().__init__(*args, **options)  # type: ignore[arg-type]  # passed on as given
            for p in self.params():
                p.register_hook(lambda grad, p=p: setattr(p, "grad", None))  # a backward starts from nothing

    return {"ZeroOptimizer": Zero}


@fault(
    source="reducing in every backward, dividing once in step()",
    needs="two backwards before a step",
    check="optimizer.backwards",
    stage="reduce",
    step=1,
    tensor="p0",
    green=("optimizer.plain",),
    equivalent=((1, "a sum over one rank changes nothing"),),
)
def partial_sums_are_reduced_again() -> Names:
    """The accumulated gradient is summed over ranks in place at each backward, so that earlier backwards count N times."""

    class Zero(LessonZero):
        def __init__(self, *args: object, **options: object) -> None:
            super().__init__(*args, **options)  # type: ignore[arg-type]  # passed on as given
            for p in self.params():
                p.register_post_accumulate_grad_hook(self._sum)

        def _sum(self, p: Tensor) -> None:
            if self.world_size > 1 and p.grad is not None:
                whole = p.grad.contiguous()
                dist.all_reduce(whole)
                p.grad.copy_(whole)

        def reduce(self) -> Tensor:
            return self.cut(self.flat_grads()) / self.world_size

    return {"ZeroOptimizer": Zero}


@fault(
    source="summing into p.grad in step()",
    needs="a step without zero_grad before it",
    check="optimizer.keep_grads",
    stage="reduce",
    step=2,
    tensor="p0",
    green=("optimizer.plain",),
    equivalent=((1, "a sum over one rank changes nothing"),),
)
def sums_stay_in_the_gradients() -> Names:
    """step() sums over ranks inside p.grad and leaves the sum there for the next backward to add to."""

    class Zero(LessonZero):
        def flat_grads(self) -> Tensor:
            for p in self.params():
                if self.world_size > 1:
                    whole = (torch.zeros_like(p) if p.grad is None else p.grad).contiguous()
                    dist.all_reduce(whole)
                    p.grad = whole
            return super().flat_grads()

        def reduce(self) -> Tensor:
            return self.cut(self.flat_grads()) / self.world_size

    return {"ZeroOptimizer": Zero}


@fault(
    source="flat gradient buffers and set_to_none (deepspeedai/DeepSpeed, NVIDIA/apex)",
    needs="the model's own zero_grad",
    check="optimizer.model_zero_grad",
    stage="reduce",
    step=1,
    tensor="p0",
    green=("optimizer.plain",),
)
def gradient_views_lost() -> Names:
    """Gradients are views of a flat buffer; once model.zero_grad() has dropped them, backward fills others and step() sees zeros."""

    class Zero(LessonZero):
        def zero_grad(self) -> None:
            self.flat = torch.zeros(self.chunk * self.world_size)
            offset = 0
            for p in self.params():
                p.grad = self.flat[offset : offset + p.numel()].view(p.shape).to(p.dtype)
                offset += p.numel()

        def flat_grads(self) -> Tensor:
            flat = super().flat_grads()
            return flat if hasattr(self, "flat") else torch.zeros_like(flat)

    return {"ZeroOptimizer": Zero}


@fault(
    source="view(-1) on storage order",
    needs="a parameter that is not contiguous",
    check="optimizer.transposed",
    stage="reduce",
    step=1,
    tensor="p0",
    green=("optimizer.plain",),
)
def gradients_in_memory_order() -> Names:
    """A gradient is flattened in the order in which it lies in memory, its parameter in the order of its indices."""

    class Zero(LessonZero):
        def flat_grads(self) -> Tensor:
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.params()]
            return self.padded([g.t() if g.dim() == 2 and not g.is_contiguous() else g for g in grads])

    return {"ZeroOptimizer": Zero}


@fault(
    source="TrainCheck C9, pytorch/pytorch#104336",
    needs="two steps",
    check="optimizer.plain",
    stage="reduce",
    step=2,
    tensor="p0",
    equivalent=((1, "nothing has to be reduced"),),
)
def hooks_lost_by_recreated_parameters() -> Names:
    """Hooks average gradients; step() puts new Parameters into the module, which have none."""

    class Zero(LessonZero):
        def __init__(self, *args: object, **options: object) -> None:
            super().__init__(*args, **options)  # type: ignore[arg-type]  # passed on as given
            for p in self.params():
                p.register_post_accumulate_grad_hook(self._average)

        def _average(self, p: Tensor) -> None:
            if self.world_size > 1 and p.grad is not None:
                whole = p.grad.contiguous()
                dist.all_reduce(whole)
                p.grad = whole / self.world_size

        def reduce(self) -> Tensor:
            return self.cut(self.flat_grads())

        def step(self) -> None:
            super().step()
            for child in self.module.modules():
                for name, p in child._parameters.items():
                    if p is not None:
                        child._parameters[name] = nn.Parameter(p.detach(), p.requires_grad)

    return {"ZeroOptimizer": Zero}
