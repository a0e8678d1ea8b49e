"""The catalogue's data type and registry: one wrong implementation, what shows it, and where it was seen.

Owns registration and turning a fault into the namespace that the contract is looked up in. Leaves each fault to its file.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from minigpt_dist import corpus, model
from minigpt_dist.verify.faults import (
    again,
    base,
    layers,
    ring,
    scaled,
    sequence_layers,
    sharded_wrapper,
    sharding,
    timetable,
    watcher,
)

Names = dict[str, Any]


@dataclass(frozen=True)
class Fault:
    """One wrong implementation.

    names: what it replaces in the correct base, by contract name. check: the check that must fail, at `world_size`. stage, step, rank,
    tensor: where it must say the fault is (None: not tied to one). green: checks that must stay green, because the fault does not
    touch what they ask. equivalent: world size -> why no probe can tell it from a correct one there. hangs: it leaves ranks waiting.
    """

    name: str
    sentence: str
    source: str
    needs: str
    check: str
    stage: str
    names: Callable[[], Names]
    world_size: int = 2
    step: int | None = None
    rank: int | None = None
    tensor: str | None = None
    green: tuple[str, ...] = ()
    equivalent: tuple[tuple[int, str], ...] = ()
    hangs: bool = False

    @property
    def file(self) -> str:
        """The file of the catalogue, or the folder of files on one piece, that holds it."""
        return self.names.__module__.removeprefix(f"{__package__}.").partition(".")[0]


FAULTS: dict[str, Fault] = {}


def fault(**facts: Any) -> Callable[[Callable[[], Names]], Callable[[], Names]]:
    """Register the decorated function, which returns the replaced names, as a fault."""

    def register(names: Callable[[], Names]) -> Callable[[], Names]:
        name = names.__name__.replace("_", "-")
        if name in FAULTS:
            raise ValueError(f"fault {name} is there twice")
        sentence = (names.__doc__ or "").strip().splitlines()[0]
        FAULTS[name] = Fault(name=name, sentence=sentence, names=names, **facts)
        return names

    return register


def unknown(kind: str, name: str, known: Iterable[str], command: str) -> ValueError:
    """The error for a name that is none of `known`: one line, with the nearest of them and the command that lists all."""
    near = difflib.get_close_matches(name, list(known), n=3)
    nearest = f" (nearest: {', '.join(near)})" if near else ""
    return ValueError(f"{kind} is {name!r}, but should be one that `{command}` lists{nearest}")


def correct_names() -> Names:
    """The correct base, by contract name; model and corpus are the package's own."""
    return {
        "MiniGPT": model.MiniGPT,
        "make_corpus": corpus.make_corpus,
        "broadcast_parameters": base.broadcast_parameters,
        "ZeroOptimizer": base.LessonZero,
        "save_sharded": base.save_sharded,
        "load_sharded": base.load_sharded,
        **ring.NAMES,
        **timetable.NAMES,
        **watcher.NAMES,
        **layers.NAMES,
        **sequence_layers.NAMES,
        **sharding.NAMES,
        **again.NAMES,
        **scaled.NAMES,
        **sharded_wrapper.NAMES,
    }


def namespace(name: str, replaced: Names) -> ModuleType:
    """A module holding the correct names with some replaced."""
    module = ModuleType(f"fault_{name}")
    for key, value in {**correct_names(), **replaced}.items():
        setattr(module, key, value)
    return module
