"""Faults of load_state_dict that only some states bring out: one of several groups, one of the first step."""

from __future__ import annotations

from typing import Any

from minigpt_dist.verify.faults.base import LessonZero
from minigpt_dist.verify.faults.catalogue import Names, fault
from minigpt_dist.verify.faults.grouped import GroupedZero


@fault(
    source="`if step > 1` for `if step > 0`, where a first checkpoint was never tried",
    needs="a state taken after the first step",
    check="optimizer.reload_now",
    stage="load",
    step=2,
    tensor="p0",
    green=("optimizer.plain", "optimizer.reload"),
)
def state_of_the_first_step_taken_for_none() -> Names:
    """A state that counts one step is taken for a fresh one, and not loaded."""

    class Zero(LessonZero):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            if state["step_count"] > 1:
                super().load_state_dict(state)

    return {"ZeroOptimizer": Zero}


@fault(
    source="`param_groups[0]` for `param_groups`",
    needs="groups with options of their own, a reload",
    check="optimizer.reload_groups",
    stage="load",
    step=3,
    green=("optimizer.plain", "optimizer.reload"),
)
def state_of_the_first_group_only() -> Names:
    """Loading gives every group the options of the first."""

    class Zero(GroupedZero):
        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            super().load_state_dict(state_dict)
            first = {k: v for k, v in self.param_groups[0].items() if k != "params"}
            for group in self.param_groups:
                group.update(first)

    return {"ZeroOptimizer": Zero}
