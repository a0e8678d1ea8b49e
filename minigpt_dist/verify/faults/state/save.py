"""Faults of being asked for the state: stale parts, moments that are used up, ranks that take no part."""

from __future__ import annotations

from typing import Any

from minigpt_dist.verify.faults.base import LessonZero
from minigpt_dist.verify.faults.catalogue import Names, fault

State = dict[str, Any]


@fault(
    source="NVIDIA/Megatron-LM#5236",
    needs="training on after a save",
    check="optimizer.snapshots",
    stage="save",
    tensor="p0",
    green=("optimizer.plain",),
)
def save_gathers_a_stale_shard() -> Names:
    """Taking the state writes a staging copy over the parameters and the master, which has not followed the last update."""

    class Zero(LessonZero):
        def step(self) -> None:
            self._staging = self.master.clone()
            super().step()

        def state_dict(self) -> State:
            self.master.copy_(getattr(self, "_staging", self.master))
            return super().state_dict()

    return {"ZeroOptimizer": Zero}


@fault(
    source="state moved out to save it",
    needs="training on after a save",
    check="optimizer.snapshots",
    stage="save",
    tensor="p0",
    green=("optimizer.plain",),
)
def save_consumes_the_moments() -> Names:
    """state_dict() hands over the moments and starts new ones."""

    class Zero(LessonZero):
        def state_dict(self) -> State:
            state = super().state_dict()
            self.exp_avg.zero_()
            self.exp_avg_sq.zero_()
            return state

    return {"ZeroOptimizer": Zero}


@fault(
    source="consolidation inside state_dict (ZeroRedundancyOptimizer.consolidate_state_dict) called by one rank",
    needs="two ranks, a reload",
    check="optimizer.reload",
    stage="save",
    green=("optimizer.plain",),
    equivalent=((1, "one rank waits for nobody"),),
    hangs=True,
)
def state_dict_gathers_on_rank_0_only() -> Names:
    """state_dict() holds a collective that only rank 0 enters."""

    class Zero(LessonZero):
        def state_dict(self) -> State:
            if self.rank == 0:
                self.gather()
            return super().state_dict()

    return {"ZeroOptimizer": Zero}
