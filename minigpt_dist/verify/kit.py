"""The kit: the modules of this package that a sandbox holds, so that ranks can run the judge's bodies there.

Owns the list: what the bodies import, and nothing else. Not in a sandbox are, by that, the reference pieces, the oracles, the checks,
the faults, the suite. Of the reference, a sandbox holds what stands beside the pieces under judgement, and never those.
"""

from __future__ import annotations

import functools
from collections.abc import Collection

from minigpt_dist.launch.sandbox.kits import closure, launch_kit

BODIES = (
    "verify.contract",
    "verify.model_probe",
    "verify.corpus_probe",
    "verify.broadcast_probe",
    "verify.ddp_probe",
    "verify.linear_probe",
    "verify.checkpoint_probe",
    "verify.collectives_probe",
    "verify.schedule_probe",
    "verify.guard_probe",
    "verify.tensor_probe",
    "verify.sequence_probe",
    "verify.sharded_probe",
    "verify.recompute_probe",
    "verify.mixed_probe",
    "verify.fsdp_probe",
    "verify.composed_probe",
    "verify.inspection",
)
PRELOAD = tuple(f"minigpt_dist.{name}" for name in BODIES)


@functools.cache
def kit() -> tuple[str, ...]:
    """The bodies' modules, all that these import, and the server's: dotted names."""
    return closure({*PRELOAD, *launch_kit()})


_REFERENCE = {
    "model": "model",
    "corpus": "corpus",
    "broadcast": "parallel.ddp",
    "optimizer": "parallel.zero",
    "checkpoint": "checkpoint",
}


def beside(slots: Collection[str]) -> tuple[str, ...]:
    """The reference pieces that stand beside an implementation's own, which fill `slots`, with all that they import; none where it
    fills all by itself."""
    if not slots:
        return ()
    return closure((f"minigpt_dist.{name}" for slot, name in _REFERENCE.items() if slot not in slots), functions=True)
