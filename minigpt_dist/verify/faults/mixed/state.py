"""Faults of what mixed precision keeps: the master copy, within a run and over a restart, and the scale over a restart."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from minigpt_dist.verify.faults.catalogue import Names, fault
from minigpt_dist.verify.faults.scaled import ScaledAdam


@fault(
    source="NVIDIA/Model-Optimizer#2322",
    needs="updates below half the spacing of parameters",
    check="precision.small_updates",
    stage="optimizer",
    green=("precision.overflow",),
)
def no_master_updates_vanish() -> Names:
    """Parameters of 16 bits are updated in place: small updates are rounded away, one after the other."""

    class Wrong(ScaledAdam):
        def update(self, grad: Tensor) -> None:
            with torch.no_grad():
                self.master.copy_(self.flat([p.detach() for p in self.params]))
            super().update(grad)

    return {"MixedPrecisionOptimizer": Wrong}


@fault(
    source="TensorAuto/OpenTau#185",
    needs="a restart, and updates below half the spacing of parameters",
    check="precision.resume",
    stage="load",
    green=("precision.plain", "precision.small_updates"),
)
def master_derived_from_16_bits() -> Names:
    """The master copy is not saved, and made again from the parameters: what it held below their spacing is lost at each restart."""

    class Wrong(ScaledAdam):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            super().load_state_dict({**state, "master": self.flat([p.detach() for p in self.params])})

    return {"MixedPrecisionOptimizer": Wrong}


@fault(
    source="NVIDIA/apex#42",
    needs="a step after a restart",
    check="precision.resume",
    stage="load",
    step=2,
    rank=0,
    green=("precision.plain", "precision.small_updates"),
)
def master_created_before_load() -> Names:
    """The master copy is that of the model's first weights: a step after the load puts these back."""

    class Wrong(ScaledAdam):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            super().load_state_dict({**state, "master": self.master.detach().clone()})

    return {"MixedPrecisionOptimizer": Wrong}


@fault(
    source="a scaler whose state is not in the checkpoint",
    needs="a restart after an overflow",
    check="precision.resume",
    stage="load",
    step=3,
    rank=0,
    green=("precision.scale", "precision.overflow"),
)
def scale_forgotten_at_a_restart() -> Names:
    """After a restart the scale is the first again, and overflows again."""

    class Wrong(ScaledAdam):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            super().load_state_dict({**state, "scale": self.scale})

    return {"MixedPrecisionOptimizer": Wrong}
