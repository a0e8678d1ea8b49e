"""The fault catalogue: small wrong implementations, each with the check that must catch it; and correct variants."""

from types import ModuleType

from minigpt_dist.verify.faults import (
    backward,
    broadcast,
    calls,
    clipping,
    collective,
    committing,
    corpus,
    ddp,
    ddp_shapes,
    decay,
    fsdp,
    gather,
    late,
    layout,
    loading,
    memory,
    mixed,
    model,
    options,
    point_to_point,
    precision,
    recompute,
    reduce,
    reloading,
    saving,
    schedule,
    sequence,
    shapes,
    state,
    tensor,
    transport,
    unused,
    update,
    variants,
    verifying,
    vocabulary,
    watching,
    zero2,
    zero3,
)
from minigpt_dist.verify.faults.catalogue import FAULTS, Fault, namespace, unknown

FILES = (
    broadcast,
    corpus,
    model,
    reduce,
    transport,
    backward,
    unused,
    update,
    decay,
    precision,
    layout,
    gather,
    memory,
    options,
    calls,
    clipping,
    point_to_point,
    schedule,
    watching,
    tensor,
    vocabulary,
    sequence,
    zero2,
    zero3,
    recompute,
    mixed,
    state,
    reloading,
    collective,
    late,
    shapes,
    ddp,
    ddp_shapes,
    fsdp,
    saving,
    committing,
    loading,
    verifying,
)

LIST = "minigpt-dist faults --list"

__all__ = ["FAULTS", "FILES", "LIST", "Fault", "build", "unknown", "variants"]


def build(name: str) -> ModuleType:
    """The implementation `fault:NAME`; `fault:none` is the correct base. ValueError for an unknown name."""
    if name == "none":
        return namespace(name, {})
    if name not in FAULTS:
        raise unknown("fault", name, ["none", *FAULTS], LIST)
    return namespace(name, FAULTS[name].names())
