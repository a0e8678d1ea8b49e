"""Faults of load_state_dict, and of what it finds: state that is not restored, restored twice, or changed on the way."""

from __future__ import annotations

from typing import Any

from minigpt_dist.verify.faults.base import LessonZero
from minigpt_dist.verify.faults.catalogue import Names, fault
from minigpt_dist.verify.faults.grouped import GroupedZero

State = dict[str, Any]


GREEN = ("optimizer.plain",)


@fault(
    source="deepspeedai/DeepSpeed#4396",
    needs="a reload soon after the start",
    check="optimizer.reload",
    stage="load",
    step=3,
    tensor="p0",
    green=GREEN,
)
def adam_step_lost() -> Names:
    """Moments are restored, the step count is not."""

    class Zero(LessonZero):
        def load_state_dict(self, state: State) -> None:
            super().load_state_dict({**state, "step_count": 0})

    return {"ZeroOptimizer": Zero}


@fault(
    source="TrainCheck N3, and optimizers whose state hides from torch",
    needs="a reload",
    check="optimizer.reload",
    stage="load",
    step=3,
    tensor="p0",
    green=GREEN,
)
def state_dict_empty() -> Names:
    """state_dict() is empty, and loading it restores nothing."""

    class Zero(LessonZero):
        def state_dict(self) -> State:
            return {}

        def load_state_dict(self, state: State) -> None:
            pass

    return {"ZeroOptimizer": Zero}


@fault(
    source="load_state_dict that rebinds a local name",
    needs="a reload",
    check="optimizer.reload",
    stage="load",
    step=3,
    tensor="p0",
    green=GREEN,
)
def state_not_restored() -> Names:
    """load_state_dict() reads the state and puts it nowhere."""

    class Zero(LessonZero):
        def load_state_dict(self, state: State) -> None:
            for name, tensor in (("exp_avg", self.exp_avg), ("exp_avg_sq", self.exp_avg_sq)):
                tensor = state[name]  # noqa: F841 - that this binds a name and copies nothing is the fault
            self.step_count = state["step_count"]

    return {"ZeroOptimizer": Zero}


@fault(
    source="one of two moments forgotten",
    needs="a reload",
    check="optimizer.reload",
    stage="load",
    step=3,
    tensor="p0",
    green=GREEN,
)
def second_moment_not_saved() -> Names:
    """exp_avg_sq is not part of the state."""

    class Zero(LessonZero):
        def state_dict(self) -> State:
            return {k: v for k, v in super().state_dict().items() if k != "exp_avg_sq"}

        def load_state_dict(self, state: State) -> None:
            super().load_state_dict({**state, "exp_avg_sq": self.exp_avg_sq})

    return {"ZeroOptimizer": Zero}


@fault(
    source="NVIDIA/apex#42",
    needs="a resume from another start",
    check="resume_bytes",
    stage="load",
    step=10,
    rank=0,
    tensor="master",
    green=("optimizer.plain", "optimizer.reload"),
)
def master_made_before_the_load() -> Names:
    """The master copy is cut from the initial model and not loaded: the first step writes it over the restored weights."""

    class Zero(LessonZero):
        def load_state_dict(self, state: State) -> None:
            super().load_state_dict({**state, "master": self.master})

    return {"ZeroOptimizer": Zero}


@fault(
    source="TensorAuto/OpenTau#185, LMResiliency and others: saved in half precision",
    needs="a reload",
    check="optimizer.reload",
    stage="load",
    step=3,
    green=GREEN,
)
def state_saved_in_bfloat16() -> Names:
    """Moments are saved in bfloat16 to halve the file."""

    class Zero(LessonZero):
        def state_dict(self) -> State:
            state = super().state_dict()
            return {**state, **{name: state[name].bfloat16() for name in ("exp_avg", "exp_avg_sq")}}

    return {"ZeroOptimizer": Zero}


@fault(
    source="TrainCheck C20, TensorFlow#29903",
    needs="a reload",
    check="optimizer.reload",
    stage="load",
    step=3,
    green=GREEN,
)
def moments_exchanged_in_the_state() -> Names:
    """exp_avg and exp_avg_sq change places on their way into the state."""

    class Zero(LessonZero):
        def state_dict(self) -> State:
            state = super().state_dict()
            return {**state, "exp_avg": state["exp_avg_sq"], "exp_avg_sq": state["exp_avg"]}

    return {"ZeroOptimizer": Zero}


@fault(
    source="counters that are added instead of set",
    needs="a state that is loaded twice",
    check="optimizer.reload_twice",
    stage="load",
    step=3,
    tensor="p0",
    green=("optimizer.plain", "optimizer.reload", "resume_bytes"),
)
def step_count_added_on_load() -> Names:
    """Loading adds the saved step count to the own one."""

    class Zero(LessonZero):
        def load_state_dict(self, state: State) -> None:
            super().load_state_dict({**state, "step_count": self.step_count + state["step_count"]})

    return {"ZeroOptimizer": Zero}


@fault(
    source="tenstorrent/tt-metal#54320, PolymathicAI/the_well#77",
    needs="a learning rate that was edited before the save",
    check="optimizer.reload_lr",
    stage="load",
    step=3,
    tensor="p0",
    green=("optimizer.plain", "optimizer.reload", "optimizer.lr_edit"),
)
def restored_lr_not_applied() -> Names:
    """Options of the groups are not restored: the constructor's learning rate is used again."""

    class Zero(GroupedZero):
        def load_state_dict(self, state: State) -> None:
            own = [dict(group) for group in self.param_groups]
            super().load_state_dict(state)
            for group, before in zip(self.param_groups, own, strict=True):
                group.update({name: before[name] for name in ("lr", "betas", "eps", "weight_decay")})

    return {"ZeroOptimizer": Zero}


@fault(
    source="pytorch/pytorch#108869",
    needs="a rank that owns nothing",
    check="optimizer.reload_tiny",
    stage="load",
    green=("optimizer.reload", "optimizer.tiny"),
    equivalent=((1, "every rank owns something"),),
)
def last_rank_owns_nothing() -> Names:
    """The state of a rank whose slice is all padding has no entries, and cannot be loaded."""

    class Zero(LessonZero):
        def state_dict(self) -> State:
            state = super().state_dict()
            empty = self.rank * self.chunk >= self.total
            return {k: v for k, v in state.items() if not (empty and k in ("master", "exp_avg", "exp_avg_sq"))}

    return {"ZeroOptimizer": Zero}
