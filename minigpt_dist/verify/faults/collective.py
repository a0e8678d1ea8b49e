"""Faults of pairing: who calls which collective, how often, in which group."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from minigpt_dist.verify.faults.base import LessonZero
from minigpt_dist.verify.faults.catalogue import Names, fault

ALONE = ((1, "there is nobody to pair with"),)


@fault(
    source="pytorch/pytorch#25390",
    needs="a rank that is no member",
    check="optimizer.plain",
    stage="launch",
    world_size=3,
    equivalent=(*ALONE, (2, "all ranks are members")),
    hangs=True,
)
def subgroup_created_only_by_members() -> Names:
    """Only its two members create a group: from then on ranks count groups differently, and the next one never comes together."""

    class Zero(LessonZero):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            if self.world_size > 2 and self.rank < 2:
                dist.new_group([0, 1])
            if self.world_size > 1:
                self.everyone = dist.new_group(list(range(self.world_size)))

    return {"ZeroOptimizer": Zero}


@fault(
    source="alan-turing-institute/autocast#386",
    needs="a log of collectives, or the last step",
    check="same_collectives",
    stage="reduce",
    equivalent=ALONE,
    hangs=True,
)
def collective_pairs_with_wrong_call() -> Names:
    """Rank 0 enters one more all-reduce each step, which pairs with its peers' next one of another meaning."""

    class Zero(LessonZero):
        def step(self) -> None:
            if self.rank == 0 and self.world_size > 1:
                self._pending = dist.all_reduce(torch.zeros(1), async_op=True)
            elif self.world_size > 1:
                dist.broadcast(torch.zeros(1), src=0)
            super().step()

    return {"ZeroOptimizer": Zero}


@fault(
    source="deepspeedai/DeepSpeed#6714, one participant lacks a collective",
    needs="two ranks",
    check="optimizer.plain",
    stage="reduce",
    equivalent=ALONE,
    hangs=True,
)
def one_rank_skips_a_barrier() -> Names:
    """All ranks but the last wait at a barrier before the reduction."""

    class Zero(LessonZero):
        def reduce(self) -> Tensor:
            if self.world_size > 1 and self.rank < self.world_size - 1:
                dist.barrier()
            return super().reduce()

    return {"ZeroOptimizer": Zero}


@fault(
    source="collective order by a set or by arrival",
    needs="two ranks, two messages",
    check="optimizer.one_tensor",
    stage="reduce",
    step=1,
    tensor="p0",
    equivalent=ALONE,
)
def reduction_order_differs_by_rank() -> Names:
    """The halves of the gradient are reduced in one order on even ranks and in the other on odd ones."""

    class Zero(LessonZero):
        def reduce(self) -> Tensor:
            flat, half = self.flat_grads(), self.chunk * self.world_size // 2
            parts = [flat[:half].clone(), flat[half : 2 * half].clone()]
            for i in (0, 1) if self.rank % 2 == 0 else (1, 0):
                if self.world_size > 1:
                    dist.all_reduce(parts[i])
            flat[: 2 * half] = torch.cat(parts)
            return self.cut(flat) / self.world_size

    return {"ZeroOptimizer": Zero}


@fault(
    source="deepspeedai/DeepSpeed#5794, unlike counts in one exchange",
    needs="ranks whose message lengths differ",
    check="optimizer.plain",
    stage="reduce",
    equivalent=ALONE,
)
def message_lengths_differ_by_rank() -> Names:
    """Each rank reduces a buffer whose length depends on its rank."""

    class Zero(LessonZero):
        def reduce(self) -> Tensor:
            flat = torch.cat([self.flat_grads(), torch.zeros(1000 * self.rank)])
            if self.world_size > 1:
                dist.all_reduce(flat)
            return self.cut(flat[: self.chunk * self.world_size]) / self.world_size

    return {"ZeroOptimizer": Zero}


@fault(
    source="steps skipped to accumulate, by a default nobody set (TrainCheck C19)",
    needs="two steps",
    check="optimizer.plain",
    stage="gather",
    step=1,
    tensor="p0",
)
def every_second_step_skipped() -> Names:
    """step() does its work at every second call only."""

    class Zero(LessonZero):
        calls = 0

        def step(self) -> None:
            self.calls += 1
            if self.calls % 2 == 0:
                super().step()

    return {"ZeroOptimizer": Zero}
