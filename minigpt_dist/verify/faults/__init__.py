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
    decay,
    gather,
    late,
    layout,
    loading,
    memory,
    model,
    options,
    precision,
    reduce,
    saving,
    state,
    transport,
    unused,
    update,
    verifying,
)
from minigpt_dist.verify.faults.catalogue import FAULTS, Fault, namespace

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
    state,
    collective,
    late,
    ddp,
    saving,
    committing,
    loading,
    verifying,
)

__all__ = ["FAULTS", "FILES", "Fault", "build"]


def build(name: str) -> ModuleType:
    """The implementation `fault:NAME`; `fault:none` is the correct base. ValueError for an unknown name."""
    if name == "none":
        return namespace(name, {})
    if name not in FAULTS:
        raise ValueError(f"fault is {name!r}, but should be one of none, {', '.join(FAULTS)}")
    return namespace(name, FAULTS[name].names())
