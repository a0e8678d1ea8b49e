"""The contract: how another implementation is plugged in, and what it is found to offer.

Owns resolving a spec (a module name, a path to a file or folder, `fault:NAME`, `variant:NAME`, `peer:NAME`) to callables, one per
slot, and the record of where each came from. A slot that an implementation lacks is an error for whoever asks for it, never ours instead.
Runs only inside ranks: foreign code is not imported by the process that judges.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from minigpt_dist.verify import as_written
from minigpt_dist.verify.absent_cuda import stand_in_for_cuda
from minigpt_dist.verify.keywords import keywords
from minigpt_dist.verify.loading import complete, load_path
from minigpt_dist.verify.shapes import (
    FSDP_FINISH,
    data_parallel_calls,
    find_data_parallel,
    find_fully_sharded,
    find_sharded_optimizer,
    finish_function,
    offered,
    takes_optimizer_class,
)

STOOD_IN = "not installed here: a stand-in that does nothing"
SLOTS: dict[str, tuple[str, ...]] = {
    "model": ("MiniGPT",),
    "corpus": ("make_corpus",),
    "broadcast": ("broadcast_parameters",),
    "optimizer": ("ZeroOptimizer",),
    "ddp": ("DistributedDataParallel",),
    "fsdp": ("FullyShardedDataParallel",),
    "checkpoint": ("save_sharded", "load_sharded"),
    "collectives": ("ring_all_reduce", "reduce_scatter", "all_gather", "tree_broadcast"),
    "pipeline": ("pipeline_schedule",),
    "guard": ("should_roll_back",),
    "tensor": (
        "ColumnParallelLinear",
        "RowParallelLinear",
        "VocabParallelEmbedding",
        "vocab_parallel_cross_entropy",
        "ParallelAttention",
    ),
    "sequence": ("SequenceLayerNorm", "gather_sequence", "scatter_sequence"),
    "clipping": ("clip_sharded_grad_norm",),
    "zero2": ("Zero2Optimizer",),
    "zero3": ("Zero3Optimizer",),
    "recompute": ("recompute",),
    "precision": ("MixedPrecisionOptimizer",),
}
# Pieces that a submission is judged for only where they are asked of it by name: its own helpers may be called so, with other arguments.
OPTIONAL = (
    "fsdp",
    "collectives",
    "pipeline",
    "guard",
    "tensor",
    "sequence",
    "clipping",
    "zero2",
    "zero3",
    "recompute",
    "precision",
)
# Pieces of torch's shape: found by inspection, and judged alone where a submission has none of the lesson's names.
BY_SHAPE = ("optimizer", "ddp", "fsdp")
FINDERS = (find_sharded_optimizer, find_data_parallel, find_fully_sharded)
WRAPPERS = ("ddp", "fsdp")  # their names are torch's as well as the lesson's: they tell no shape
OWN_PREFIXES = ("fault:", "variant:")  # what the judge plants, it plants under these names
OURS = "minigpt_dist"


class MissingPieceError(Exception):
    """An implementation was asked for a piece it does not have."""


@dataclass
class Implementation:
    """The names of the contract, as found: `names[n]` is a callable, `origins[n]` says where it came from."""

    spec: str
    names: dict[str, Callable[..., Any]]
    origins: dict[str, str]
    extras: dict[str, Any] = field(default_factory=dict)
    shape: str = "lesson"
    slots: tuple[str, ...] = ()

    @property
    def averages_outside(self) -> bool:
        """Does the optimizer expect gradients that are averaged already (torch's shape), rather than average them itself?"""
        theirs = not self.slots or "optimizer" in self.slots
        return theirs and takes_optimizer_class(keywords(self.require("ZeroOptimizer"))[0] - {"options"})

    def require(self, name: str) -> Callable[..., Any]:
        """The callable called `name`. MissingPieceError if the implementation has none."""
        if name not in self.names:
            raise MissingPieceError(f"{self.spec} has no {name}")
        return self.names[name]

    def offers(self, slot: str) -> bool:
        """Is it to be judged for this piece? It may still lack a name of it."""
        return slot in self.slots or not asked_by_name(slot, self.spec)

    @property
    def ours(self) -> bool:
        """Is this the package itself, or one of its variants, with the options of our own classes?"""
        return bool(self.extras.get("ours"))


@functools.cache
def resolve(spec: str, slots: tuple[str, ...] = ()) -> Implementation:
    """Find the pieces that `spec` offers. With `slots`, only those are looked for there and the rest are ours, and said to be.

    A file with none of the lesson's names but pieces of torch's shape (`shapes.py`) is judged for just those pieces.

    Raises ValueError for an unknown spec or slot, and whatever importing foreign code raises.
    """
    unknown = [s for s in slots if s not in SLOTS]
    if unknown:
        raise ValueError(f"slot is {unknown[0]!r}, but should be one of {', '.join(SLOTS)}")
    module = load_module(spec)
    found = Implementation(spec, {}, {}, dict(getattr(module, "EXTRAS", {})))
    found.extras.setdefault("ours", spec == OURS)
    torch_shape = dict(zip(BY_SHAPE, (f(module) for f in FINDERS), strict=True))
    asked = [slot for slot in SLOTS if slot in slots or not asked_by_name(slot, spec)]
    if _torchs_shape(module, spec, slots):
        found.shape = "torch"
        slots = slots or tuple(slot for slot, piece in torch_shape.items() if offered(piece))
        slots = slots or tuple(
            slot for slot, piece in torch_shape.items() if piece is not None
        )  # stubs, and nothing else
        slots = slots or tuple(s for s in WRAPPERS if any(is_torchs(getattr(module, n, None)) for n in SLOTS[s]))
        if not slots:
            raise ValueError(
                f"{spec} offers nothing of the contract: none of {', '.join(n for names in SLOTS.values() for n in names)}"
            )
        found.extras["start"], found.extras["finish"] = data_parallel_calls(module)
    found.extras["fsdp"] = module, finish_function(module, FSDP_FINISH)
    looked_for = [slot for slot in SLOTS if slot in asked or slot in slots]
    own = importlib.import_module(OURS)
    for slot in looked_for:
        theirs = not slots or slot in slots
        for name in SLOTS[slot]:
            value = getattr(module, name, None) if theirs else _own_piece(own, name)
            if theirs and slot in torch_shape and (value is None or (is_torchs(value) and torch_shape[slot])):
                value = torch_shape[slot]
            if callable(value):
                found.names[name] = value
                found.origins[name] = f"{spec if theirs else OURS}:{getattr(value, '__name__', name)}"
    found.slots = tuple(slots)
    for name in found.extras.get("stood_in", ()):
        found.origins[f"import {name}"] = as_written.SAID if name == as_written.NAME else STOOD_IN
    return found


def _torchs_shape(module: ModuleType, spec: str, slots: tuple[str, ...] = ()) -> bool:
    """Has the module none of the lesson's own names for what is asked of it, or only one that it gave an optimizer of torch's shape?"""
    asked = [slot for slot in SLOTS if slot in slots or not asked_by_name(slot, spec)]
    lesson = [n for s in asked if s not in WRAPPERS for n in SLOTS[s] if callable(getattr(module, n, None))]
    return not lesson or (lesson == ["ZeroOptimizer"] and find_sharded_optimizer(module) is not None)


def is_torchs(value: Any) -> bool:
    """Is this torch's own, that a submission imported, to compare with or to pass off?"""
    return str(getattr(value, "__module__", "")).startswith("torch.")


def asked_by_name(slot: str, spec: str) -> bool:
    """Is this piece of this implementation, which is neither the package nor one of the judge's plants, judged only on request?"""
    return slot in OPTIONAL and spec != OURS and not spec.startswith(OWN_PREFIXES)


def absence(name: str, spec: str) -> str:
    """What to say of a name that was not found."""
    slot = next(slot for slot, names in SLOTS.items() if name in names)
    return f"not asked; --slots {slot} does" if asked_by_name(slot, spec) else "missing"


def _own_piece(own: ModuleType, name: str) -> Any:
    """Our piece of that name; None where we have none, or it is kept out of this sandbox."""
    try:
        return getattr(own, name, None)
    except ModuleNotFoundError:
        return None


def slots_body(spec: str, slots: list[str]) -> list[str]:
    """On a rank: the slots that the implementation's own pieces fill, where the others are to be ours; none if all are its own."""
    return list(resolve(spec, tuple(slots)).slots)


def origins_body(spec: str, slots: list[str]) -> dict[str, str]:
    """On a rank: where each name of the contract came from."""
    return resolve(spec, tuple(slots)).origins


def load_module(spec: str) -> ModuleType:
    """Import what `spec` names. ValueError if nothing is there."""
    for prefix, home in (("fault:", "faults"), ("variant:", "faults.variants")):
        if spec.startswith(prefix):
            planted = importlib.import_module(f"minigpt_dist.verify.{home}")
            return planted.build(spec.removeprefix(prefix))  # type: ignore[no-any-return]  # imported by name, to keep it optional
    if spec.startswith("peer:"):
        peers = importlib.import_module("minigpt_dist.verify.peers")
        return peers.build(spec.removeprefix("peer:"))  # type: ignore[no-any-return]  # as above
    path = Path(spec)
    if path.suffix == ".py" or path.is_dir() or "/" in spec:
        stand_in_for_cuda()
        module, stood_in = load_path(path)
        if path.is_dir() and _torchs_shape(module, spec) and not all(offered(find(module)) for find in FINDERS):
            complete(module, path, stood_in)
        module.__dict__.setdefault("EXTRAS", {"stood_in": stood_in})
        return module
    try:
        known = importlib.util.find_spec(spec) is not None
    except ModuleNotFoundError:  # of a.b, where there is no a
        known = False
    if not known:
        raise ValueError(
            f"implementation is {spec!r}, but should be a module, a path, fault:NAME, variant:NAME or peer:NAME"
        )
    return importlib.import_module(spec)
