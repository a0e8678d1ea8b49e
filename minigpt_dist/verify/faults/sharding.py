"""An eighth host for faults: correct ZeRO stages 2 and 3, parameter by parameter, on the lesson's stage 1. It shares no code with
`parallel/stages`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from minigpt_dist.verify.faults.base import LessonZero


class LessonZero2(LessonZero):
    """A hook sums each gradient over ranks as soon as backward has it, adds this rank's part to its slice, and frees it."""

    def __init__(self, module: nn.Module, world_size: int, rank: int, bucket_mb: float = 0.0, **options: Any) -> None:
        super().__init__(module, world_size, rank, **options)
        self.sums = torch.zeros_like(self.master)
        self.place: dict[Tensor, int] = {}
        for p in self.params():
            self.place[p] = sum(q.numel() for q in self.place)
            p.register_post_accumulate_grad_hook(self.arrived)

    def part(self, p: Tensor) -> tuple[slice, slice]:
        """This rank's elements of `p`: where they lie in it, and where in the slice."""
        start, lo = self.place[p], self.rank * self.chunk
        first, last = max(start, lo), min(start + p.numel(), lo + self.chunk)
        last = max(first, last)
        return slice(first - start, last - start), slice(first - lo, last - lo)

    def over_ranks(self, grad: Tensor) -> Tensor:
        """The sum over ranks, in place."""
        if self.world_size > 1:
            dist.all_reduce(grad)
        return grad

    @torch.no_grad()
    def arrived(self, p: Tensor) -> None:
        assert p.grad is not None
        self.take(p, self.over_ranks(p.grad.flatten()))
        p.grad = None

    def take(self, p: Tensor, total: Tensor) -> None:
        here, there = self.part(p)
        if here.start < here.stop:
            self.sums[there] += total[here]

    def reduce(self) -> Tensor:
        grad = self.sums / self.world_size
        self.sums.zero_()
        return grad

    def zero_grad(self) -> None:
        super().zero_grad()
        self.sums.zero_()


class LessonZero3(LessonZero2):
    """Parameters have memory while their module runs: hooks fill it before its forward and its backward, and give it back after."""

    def __init__(self, module: nn.Module, world_size: int, rank: int, bucket_mb: float = 0.0, **options: Any) -> None:
        super().__init__(module, world_size, rank, **options)
        for p in self.params():
            p.data = p.data.clone()
        for unit in self.units():
            unit.register_forward_pre_hook(lambda m, _: self.fill(m))
            unit.register_forward_hook(lambda m, _, out: self.ran(m, out))
        self.free(self.params())

    def units(self) -> list[nn.Module]:
        return [m for m in self.module.modules() if any(True for _ in m.parameters(recurse=False))]

    def trained(self, unit: nn.Module) -> list[nn.Parameter]:
        return [p for p in unit.parameters(recurse=False) if p.requires_grad]

    def whole(self, p: Tensor) -> bool:
        return p.untyped_storage().nbytes() > 0

    def gathered_value(self, p: Tensor) -> Tensor:
        """All ranks' parts of `p`, 1-D."""
        here, there = self.part(p)
        whole = torch.zeros(p.numel())
        if here.start < here.stop:
            whole[here] = self.master[there]
        return self.over_ranks(whole)

    @torch.no_grad()
    def fill(self, unit: nn.Module) -> None:
        for p in self.trained(unit):
            if not self.whole(p):
                p.untyped_storage().resize_(p.numel() * p.element_size())
                p.data.copy_(self.gathered_value(p).view(p.shape))

    def free(self, params: Any) -> None:
        for p in params:
            p.untyped_storage().resize_(0)

    def ran(self, unit: nn.Module, out: Tensor) -> None:
        """After a unit's forward."""
        self.free(self.trained(unit))
        if out.requires_grad:
            out.register_hook(lambda _: self.fill(unit))

    def arrived(self, p: Tensor) -> None:
        super().arrived(p)
        self.free([p])

    def write_back(self, flat: Tensor) -> None:
        """Nothing is whole between steps."""

    def gather(self) -> Tensor:
        return self.master

    @contextmanager
    def gathered(self) -> Iterator[None]:
        for unit in self.units():
            self.fill(unit)
        yield
        self.free(self.params())


NAMES = {"Zero2Optimizer": LessonZero2, "Zero3Optimizer": LessonZero3}
