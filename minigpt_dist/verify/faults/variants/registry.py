"""The registry of correct variants: what each replaces in the correct base, by its name."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

from minigpt_dist.verify.faults.catalogue import Names, namespace, unknown

LIST = "minigpt-dist faults --variants --list"
VARIANTS: dict[str, Callable[[], Names]] = {}


def variant(names: Callable[[], Names]) -> Callable[[], Names]:
    """Register the decorated function, which returns what it replaces in the correct base."""
    VARIANTS[names.__name__.replace("_", "-")] = names
    return names


def build(name: str) -> ModuleType:
    """The implementation `variant:NAME`. ValueError for an unknown name."""
    if name not in VARIANTS:
        raise unknown("variant", name, VARIANTS, LIST)
    return namespace(name, VARIANTS[name]())
