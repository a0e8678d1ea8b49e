"""Faults of what users set: learning-rate edits, parameter groups, closures, frozen parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from minigpt_dist.verify.faults.base import LessonZero
from minigpt_dist.verify.faults.catalogue import Names, fault
from minigpt_dist.verify.faults.grouped import GroupedZero

Closure = Callable[[], float] | None


@fault(
    source="huggingface/transformers, schedulers over wrapped optimizers",
    needs="an edit of the learning rate",
    check="optimizer.lr_edit",
    stage="optimizer",
    step=2,
    tensor="p0",
    green=("optimizer.plain", "param_norms"),
)
def lr_edits_ignored() -> Names:
    """The learning rate is read once, at construction."""

    class Zero(LessonZero):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self._lr = self.lr

        def apply(self, first: Tensor, second: Tensor) -> None:
            self.master.addcdiv_(first, second.sqrt().add_(self.eps), value=-self._lr)

    return {"ZeroOptimizer": Zero}


@fault(
    source="tenstorrent/tt-metal#54320, without the restart",
    needs="an edit of the learning rate",
    check="optimizer.lr_edit",
    stage="optimizer",
    step=2,
    tensor="p0",
    green=("optimizer.plain",),
)
def lr_edits_one_step_late() -> Names:
    """The learning rate of a step is the one that was set before the last step ended."""

    class Zero(LessonZero):
        def step(self) -> None:
            now = self.lr
            self.lr = getattr(self, "_next", now)
            super().step()
            self.lr = self._next = now

    return {"ZeroOptimizer": Zero}


@fault(
    source="options of groups flattened into one",
    needs="a group with a learning rate of its own",
    check="optimizer.groups_lr",
    stage="optimizer",
    step=1,
    tensor="p1",
    green=("optimizer.plain", "optimizer.lr_edit"),
)
def group_learning_rates_ignored() -> Names:
    """All groups are updated with the first group's learning rate."""

    class Zero(GroupedZero):
        def update(self, p: nn.Parameter, grad: Tensor, group: dict[str, Any]) -> None:
            super().update(p, grad, {**group, "lr": self.param_groups[0]["lr"]})

    return {"ZeroOptimizer": Zero}


@fault(
    source="options of groups flattened into one",
    needs="a group without decay",
    check="optimizer.groups_decay",
    stage="optimizer",
    step=1,
    tensor="p0",
    green=("optimizer.plain", "optimizer.weight_decay"),
)
def group_decay_ignored() -> Names:
    """All groups decay as the first one does."""

    class Zero(GroupedZero):
        def update(self, p: nn.Parameter, grad: Tensor, group: dict[str, Any]) -> None:
            super().update(p, grad, {**group, "weight_decay": self.param_groups[0]["weight_decay"]})

    return {"ZeroOptimizer": Zero}


@fault(
    source="pytorch/pytorch, ZeroRedundancyOptimizer.add_param_group",
    needs="a group added after construction",
    check="optimizer.late_group",
    stage="optimizer",
    step=2,
    tensor="p5",
    green=("optimizer.plain", "optimizer.groups_lr"),
)
def late_group_never_optimized() -> Names:
    """add_param_group is accepted, but step() goes through the groups of the beginning."""

    class Zero(GroupedZero):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self._first = len(self.param_groups)

        def members(self) -> Iterator[tuple[dict[str, Any], nn.Parameter]]:
            known = self.param_groups[: self._first]
            return ((group, p) for group in known for p in group["params"] if p.requires_grad)

    return {"ZeroOptimizer": Zero}


@fault(
    source="options of groups flattened into one",
    needs="a group with an eps of its own",
    check="optimizer.groups_eps",
    stage="optimizer",
    step=1,
    tensor="p0",
    green=("optimizer.plain", "optimizer.large_eps"),
)
def group_eps_ignored() -> Names:
    """All groups use the first group's eps."""

    class Zero(GroupedZero):
        def update(self, p: nn.Parameter, grad: Tensor, group: dict[str, Any]) -> None:
            super().update(p, grad, {**group, "eps": self.param_groups[0]["eps"]})

    return {"ZeroOptimizer": Zero}


@fault(
    source="options of groups flattened into one",
    needs="a group with betas of its own",
    check="optimizer.groups_betas",
    stage="optimizer",
    step=2,
    tensor="p0",
    green=("optimizer.plain", "optimizer.betas"),
)
def group_betas_ignored() -> Names:
    """All groups use the first group's betas."""

    class Zero(GroupedZero):
        def update(self, p: nn.Parameter, grad: Tensor, group: dict[str, Any]) -> None:
            super().update(p, grad, {**group, "betas": self.param_groups[0]["betas"]})

    return {"ZeroOptimizer": Zero}


@fault(
    source="defaults copied at construction",
    needs="an edit of weight decay",
    check="optimizer.decay_edit",
    stage="optimizer",
    step=2,
    tensor="p0",
    green=("optimizer.plain", "optimizer.weight_decay", "optimizer.groups_decay"),
)
def decay_edits_ignored() -> Names:
    """Each group's weight decay is read once, when the group is added."""

    class Zero(GroupedZero):
        def add_param_group(self, param_group: dict[str, Any]) -> None:
            super().add_param_group(param_group)
            self.param_groups[-1]["decay"] = self.param_groups[-1]["weight_decay"]

        def update(self, p: nn.Parameter, grad: Tensor, group: dict[str, Any]) -> None:
            super().update(p, grad, {**group, "weight_decay": group["decay"]})

    return {"ZeroOptimizer": Zero}


@fault(
    source="pytorch/pytorch, ZeroRedundancyOptimizer.add_param_group",
    needs="a late group with a learning rate of its own",
    check="optimizer.late_group_lr",
    stage="optimizer",
    step=2,
    tensor="p5",
    green=("optimizer.plain", "optimizer.late_group", "optimizer.groups_lr"),
)
def late_group_gets_the_defaults() -> Names:
    """Parameters of a late group are taken into the first group; options that came with them are dropped."""

    class Zero(GroupedZero):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self._built = True

        def add_param_group(self, param_group: dict[str, Any]) -> None:
            if hasattr(self, "_built"):
                self.param_groups[0]["params"].extend(param_group["params"])
            else:
                super().add_param_group(param_group)

    return {"ZeroOptimizer": Zero}


@fault(
    source="tenstorrent/tt-metal#54320, the other way round: options restored by an object nobody edits",
    needs="an edit of the learning rate after a load",
    check="optimizer.reload_edit",
    stage="optimizer",
    step=4,
    tensor="p0",
    green=("optimizer.plain", "optimizer.reload", "optimizer.lr_edit"),
)
def lr_edits_lost_after_a_load() -> Names:
    """Loading keeps the saved learning rate in a place of its own, which later edits do not reach."""

    class Zero(LessonZero):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            super().load_state_dict(state)
            self._loaded = self.lr

        def apply(self, first: Tensor, second: Tensor) -> None:
            now, self.lr = self.lr, getattr(self, "_loaded", self.lr)
            super().apply(first, second)
            self.lr = now

    return {"ZeroOptimizer": Zero}


@fault(
    source="linear scaling rule applied inside the optimizer",
    needs="more than one rank",
    check="optimizer.plain",
    stage="optimizer",
    step=1,
    tensor="p0",
    equivalent=((1, "a factor of one"),),
)
def lr_scaled_by_world_size() -> Names:
    """The learning rate is multiplied by the number of ranks."""

    class Zero(LessonZero):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.lr *= self.world_size

    return {"ZeroOptimizer": Zero}
