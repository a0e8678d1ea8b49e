"""Faults of memory: state that is not shared out, or not evenly, or that grows."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from minigpt_dist.verify.faults.base import LessonZero
from minigpt_dist.verify.faults.catalogue import Names, fault

RIGHT_VALUES = ("optimizer.plain", "monotone_loss", "param_norms", "resume_bytes", "oracle")


@fault(
    source="an optimizer that says 12P/N and holds 12P",
    needs="a census of bytes",
    check="optimizer.sharded",
    stage="memory",
    step=2,
    green=RIGHT_VALUES,
    equivalent=((1, "one rank holds everything anyway"),),
)
def full_state_reported_as_a_share() -> Names:
    """Every rank keeps master copy and moments of all parameters, and reports 12P/N bytes."""

    class Zero(LessonZero):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.hidden = torch.zeros(3 * max(0, self.total - self.chunk))  # what the others own

        def shard_bytes(self) -> int:
            return 12 * self.chunk

    return {"ZeroOptimizer": Zero}


@fault(
    source="state moved out of a census's sight",
    needs="a census of what is no tensor",
    check="optimizer.sharded",
    stage="memory",
    step=2,
    green=RIGHT_VALUES,
    equivalent=((1, "one rank holds everything anyway"),),
)
def full_state_in_numpy_arrays() -> Names:
    """Every rank keeps master copy and moments of all parameters, outside its slice as arrays of numpy."""

    class Zero(LessonZero):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.hidden = [np.ones(self.total - self.chunk, dtype=np.float32) for _ in range(3)]

    return {"ZeroOptimizer": Zero}


@fault(
    source="deepspeedai/DeepSpeed#532",
    needs="a model smaller than the alignment",
    check="optimizer.sharded",
    stage="memory",
    step=2,
    green=RIGHT_VALUES,
)
def alignment_padding_inflates_memory() -> Names:
    """Slices are rounded up to a multiple of 65,536 elements."""

    class Zero(LessonZero):
        def padded(self, parts: list[Tensor]) -> Tensor:
            self.chunk = -(-self.chunk // 65_536) * 65_536
            return super().padded(parts)

    return {"ZeroOptimizer": Zero}


@fault(
    source="a slice that is a view keeps the whole",
    needs="a census of storages",
    check="optimizer.sharded",
    stage="memory",
    step=2,
    green=RIGHT_VALUES,
    equivalent=((1, "the slice is the whole"),),
)
def slice_keeps_the_whole_vector_alive() -> Names:
    """The master slice is a view of the whole flat vector, which therefore stays in memory on every rank."""

    class Zero(LessonZero):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            flat = self.flat_params()
            self.master = flat[self.rank * self.chunk : (self.rank + 1) * self.chunk]
            self.exp_avg = torch.zeros_like(flat)[: self.chunk]

    return {"ZeroOptimizer": Zero}


@fault(
    source="greedy partition that never moves on (torch ZeroRedundancyOptimizer's unevenness, taken to its end)",
    needs="bytes rank by rank",
    check="optimizer.balanced",
    stage="memory",
    step=2,
    rank=0,
    green=("optimizer.plain", "optimizer.sharded"),
    equivalent=((1, "one rank owns everything anyway"),),
)
def first_rank_owns_everything() -> Names:
    """All state lies on rank 0; the others own empty slices."""

    class Zero(LessonZero):
        def padded(self, parts: list[Tensor]) -> Tensor:
            return torch.cat([t.detach().float().flatten() for t in parts])

        def cut(self, flat: Tensor) -> Tensor:
            return flat.clone() if self.rank == 0 else flat[:0].clone()

        def gather(self) -> Tensor:
            if self.world_size == 1:
                return self.master
            flat = self.master.clone() if self.rank == 0 else self.master.new_zeros(self.total)
            torch.distributed.broadcast(flat, src=0)
            return flat

    return {"ZeroOptimizer": Zero}


@fault(
    source="deepspeedai/DeepSpeed#5700",
    needs="a census at every step",
    check="live_bytes",
    stage="memory",
    step=5,
    rank=0,
    green=("optimizer.plain", "monotone_loss", "param_norms"),
)
def state_grows_with_steps() -> Names:
    """Every reduced gradient is kept in a list."""

    class Zero(LessonZero):
        def reduce(self) -> Tensor:
            reduced = super().reduce()
            self.history = [*getattr(self, "history", []), reduced]
            return reduced

    return {"ZeroOptimizer": Zero}


@fault(
    source="two optimizers sharing a class-level cache",
    needs="two optimizers in one process",
    check="optimizer.two_optimizers",
    stage="optimizer",
    tensor="p0",
    green=("optimizer.one_tensor",),
)
def moments_shared_by_two_optimizers() -> Names:
    """The moments live in a class attribute, by slice length: a second optimizer of the same size uses the first one's."""

    class Zero(LessonZero):
        cache: dict[int, tuple[Tensor, Tensor]] = {}  # noqa: RUF012 - that it is shared is the fault

        def step(self) -> None:
            held = self.cache.setdefault(id(self.cache) + self.chunk, (self.exp_avg, self.exp_avg_sq))
            self.exp_avg, self.exp_avg_sq = held
            super().step()

    return {"ZeroOptimizer": Zero}


@fault(
    source="class-level step counters in Adam from scratch",
    needs="two optimizers in one process",
    check="optimizer.two_optimizers",
    stage="optimizer",
    tensor="p0",
)
def step_count_shared_by_two_optimizers() -> Names:
    """The step count is a class attribute that every optimizer of the process moves."""

    class Zero(LessonZero):
        count = 0

        def update(self, grad: Tensor) -> None:
            Zero.count += 1
            self.step_count = Zero.count
            super().update(grad)

    return {"ZeroOptimizer": Zero}
