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
    model,
    options,
    point_to_point,
    precision,
    reduce,
    reloading,
    saving,
    schedule,
    shapes,
    state,
    transport,
    unused,
    update,
    verifying,
    watching,
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

__all__ = ["FAULTS", "FILES", "LIST", "Fault", "build", "unknown"]


def build(name: str) -> ModuleType:
    """The implementation `fault:NAME`; `fault:none` is the correct base. ValueError for an unknown name."""
    if name == "none":
        return namespace(name, {})
    if name not in FAULTS:
        raise unknown("fault", name, ["none", *FAULTS], LIST)
    return namespace(name, FAULTS[name].names())
