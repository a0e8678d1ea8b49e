"""Faults of the lifetime of what stage 3 gathers: freed too early, too late or never, or kept stale."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from minigpt_dist.verify.faults.catalogue import Names, fault
from minigpt_dist.verify.faults.sharding import LessonZero3


@fault(
    source="OpenRLHF/OpenRLHF#1258",
    needs="parameters that should change",
    check="zero3.plain",
    stage="reduce",
    step=1,
    tensor="units.0.weight",
)
def most_layers_get_no_gradient() -> Names:
    """Backward accumulates into tensors that are thrown away for all but biases: matrices stay as they are, and the loss falls."""

    class Wrong(LessonZero3):
        def take(self, p: Tensor, total: Tensor) -> None:
            if p.dim() == 1:
                super().take(p, total)

    return {"Zero3Optimizer": Wrong}


@fault(
    source="Rajbhandari et al. 2020, section 5.3: parameters are gathered once more for backward",
    needs="a gradient that depends on a weight",
    check="zero3.plain",
    stage="reduce",
    step=1,
    tensor="units.0.weight",
)
def not_gathered_again_for_backward() -> Names:
    """Backward finds memory of the right size, and zeros in it."""

    class Wrong(LessonZero3):
        def ran(self, unit: nn.Module, out: Tensor) -> None:
            self.free(self.trained(unit))
            if out.requires_grad:
                out.register_hook(lambda _: self.blank(unit))

        def blank(self, unit: nn.Module) -> None:
            for p in self.trained(unit):
                p.untyped_storage().resize_(p.numel() * p.element_size())
                p.data.zero_()

    return {"Zero3Optimizer": Wrong}


@fault(
    source="deepspeedai/DeepSpeed, stage 3: parameters persist between steps below a size, and must be refreshed by the step",
    needs="an update",
    check="zero3.plain",
    stage="reduce",
    step=1,
)
def small_parameters_stay_whole_and_stale() -> Names:
    """Biases are gathered once and kept; a step changes the master copy alone."""

    class Wrong(LessonZero3):
        def free(self, params: Any) -> None:
            super().free([p for p in params if p.dim() > 1])

    return {"Zero3Optimizer": Wrong}


@fault(
    source="Rajbhandari et al. 2020, section 5.3: parameters are discarded once used",
    needs="bytes alive in forward",
    check="zero3.parameters",
    stage="memory",
    world_size=4,
    green=("zero3.plain",),
)
def units_are_freed_after_backward_only() -> Names:
    """Forward frees nothing: at its end, every rank has the whole model."""

    class Wrong(LessonZero3):
        def ran(self, unit: nn.Module, out: Tensor) -> None:
            if out.requires_grad:
                out.register_hook(lambda _: self.fill(unit))
            else:
                self.free(self.trained(unit))

    return {"Zero3Optimizer": Wrong}


@fault(
    source="FULL_SHARD of one unit: a wrapper without a policy gathers the model at once",
    needs="bytes alive in forward",
    check="zero3.parameters",
    stage="memory",
    world_size=4,
    green=("zero3.plain",),
)
def model_is_gathered_at_once() -> Names:
    """The first unit's forward gathers all units', and they are freed one by one in backward."""

    class Wrong(LessonZero3):
        def fill(self, unit: nn.Module) -> None:
            for every in self.units():
                super().fill(every)

        def ran(self, unit: nn.Module, out: Tensor) -> None:
            if not out.requires_grad:
                self.free(self.params())
            elif unit is self.units()[0]:
                out.register_hook(lambda _: super(Wrong, self).fill(unit))

    return {"Zero3Optimizer": Wrong}


@fault(
    source="a float32 copy of the parameters that nobody sharded",
    needs="bytes alive at rest",
    check="zero3.parameters",
    stage="memory",
    world_size=4,
    green=("zero3.plain",),
)
def whole_copy_is_kept_at_rest() -> Names:
    """Beside its slice every rank keeps the parameters that it began with."""

    class Wrong(LessonZero3):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            with self.gathered():
                self.copy = [p.detach().clone() for p in self.params()]

    return {"Zero3Optimizer": Wrong}


@fault(
    source="p.grad left whole where parameters are sharded",
    needs="bytes alive between backward and step",
    check="zero3.gradients",
    stage="memory",
    world_size=4,
    green=("zero3.plain",),
)
def stage_3_keeps_whole_gradients() -> Names:
    """Parameters are freed after their backward, and their summed gradients are not."""

    class Wrong(LessonZero3):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.kept: list[Tensor] = []

        def take(self, p: Tensor, total: Tensor) -> None:
            self.kept.append(total)
            super().take(p, total)

        def reduce(self) -> Tensor:
            self.kept.clear()
            return super().reduce()

    return {"Zero3Optimizer": Wrong}


@fault(
    source="Rajbhandari et al. 2020, section 5.2, of stage 3",
    needs="bytes alive while backward runs",
    check="zero3.peak",
    stage="memory",
    world_size=4,
    green=("zero3.plain",),
)
def stage_3_reduces_when_backward_has_ended() -> Names:
    """All gradients are alive at once: they are exchanged at the end of backward."""

    class Wrong(LessonZero3):
        waiting = False

        def arrived(self, p: Tensor) -> None:
            if not self.waiting:
                self.waiting = True
                torch.autograd.Variable._execution_engine.queue_callback(self.ended)

        def ended(self) -> None:
            self.waiting = False
            for p in self.params():
                if p.grad is not None:
                    super().arrived(p)

    return {"Zero3Optimizer": Wrong}
