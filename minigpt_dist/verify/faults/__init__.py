"""The fault catalogue: small wrong implementations, each from a public report, each with the check that must catch it."""

from types import ModuleType

from minigpt_dist.verify.faults import broadcast, optimizer
from minigpt_dist.verify.faults.catalogue import FAULTS, Fault, namespace

__all__ = ["FAULTS", "Fault", "broadcast", "build", "optimizer"]


def build(name: str) -> ModuleType:
    """The implementation `fault:NAME`; `fault:none` is the correct base. ValueError for an unknown name."""
    if name == "none":
        return namespace(name, {})
    if name not in FAULTS:
        raise ValueError(f"fault is {name!r}, but should be one of none, {', '.join(FAULTS)}")
    return namespace(name, FAULTS[name].names())
