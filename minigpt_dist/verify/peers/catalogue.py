"""The list of peers: where each is built, which packages it needs, and its traits.

Owns finding a peer by name without importing it: the process that judges reads this list, ranks build from it.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from minigpt_dist.model import MiniGPT
from minigpt_dist.verify.peers.traits import Traits

PREFIX = "peer:"
INSTALL = "pip install -e '.[peers]'"


@dataclass(frozen=True)
class Peer:
    """One package under the composed run. `builder` names a class in `module` whose `pieces()` makes the worker's Pieces.

    needs: importable packages beyond torch. uses: what it needs of torch that older releases lack, as a dotted name.
    offers: contract names that the builder also has as attributes.
    """

    module: str
    builder: str
    traits: Traits
    options: dict[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    uses: str = ""
    offers: tuple[str, ...] = ()


def _deepspeed(stage: int, traits: Traits) -> Peer:
    return Peer("deepspeed_zero", "ZeroStage", traits, options={"stage": stage}, needs=("deepspeed",))


PEERS: dict[str, Peer] = {
    "torch-ddp": Peer(
        "data_parallel",
        "DataParallel",
        Traits(8, "all", settles_on_resume=True, order="buckets"),
        offers=("DistributedDataParallel",),
    ),
    "torch-zero": Peer(
        "data_parallel",
        "ZeroRedundancy",
        Traits(8, "whole", settles_on_resume=True, order="buckets"),
        offers=("ZeroOptimizer",),
    ),
    "fsdp2": Peer(
        "fully_sharded",
        "FullyShard",
        Traits(8, "rows", sharded_parameters=True, order="units"),
        uses="torch.cpu.Stream.record_event",
    ),
    "deepspeed-1": _deepspeed(1, Traits(12, "flat", alignment=2, buffers=True, order="flat")),
    "deepspeed-2": _deepspeed(2, Traits(12, "flat", alignment=2, buffers=True, order="reversed")),
    "deepspeed-3": _deepspeed(3, Traits(12, "slices", buffers=True, order="slices")),
}

# Pieces rather than whole runs: `--impl` cannot put them to the suite, their tests hold them against one process.
LAYERS: dict[str, tuple[str, ...]] = {"torch-pipelining": (), "torch-tp": (), "megatron": ("megatron.core",)}


def peer_of(spec: str) -> Peer | None:
    """The peer that `spec` names, None for any other kind of spec. ValueError for one that is no whole run, or not in the list."""
    if not spec.startswith(PREFIX):
        return None
    name = spec.removeprefix(PREFIX)
    if name in LAYERS:
        raise ValueError(f"peer {name!r} is a piece, but should be a whole run: one of {', '.join(PEERS)}")
    if name not in PEERS:
        raise ValueError(f"peer is {name!r}, but should be one of {', '.join(PEERS)}")
    return PEERS[name]


def traits_of(spec: str) -> Traits | None:
    """The declared traits of a peer, None for any other implementation."""
    peer = peer_of(spec)
    return None if peer is None else peer.traits


def unavailable(spec: str) -> str:
    """Why a peer cannot run here: packages that are not installed, a torch that is too old. Empty if it can, and for what is no peer."""
    name = spec.removeprefix(PREFIX)
    if name in LAYERS and spec != name:
        needs, uses = LAYERS[name], ""
    else:
        peer = peer_of(spec)
        needs, uses = (peer.needs, peer.uses) if peer else ((), "")
    absent = [package for package in needs if not _installed(package)]
    if uses and not _has(uses):
        return f"{spec} needs {uses}, which this torch does not have"
    return f"{spec} needs {', '.join(absent)}: {INSTALL}" if absent else ""


def _has(dotted: str) -> bool:
    """Is there such an attribute of torch?"""
    value: Any = importlib.import_module("torch")
    for name in dotted.split(".")[1:]:
        value = getattr(value, name, None)
    return value is not None


def _installed(package: str) -> bool:
    """Can it be imported? Only looked up: not imported here."""
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # the package it would lie in is not there either
        return False


def build(name: str) -> ModuleType:
    """The namespace that the contract is looked up in: the package's model, what the peer offers, its pieces.

    Raises ValueError for a name that is not in the list, ModuleNotFoundError where its packages are not installed.
    """
    peer = peer_of(PREFIX + name)
    assert peer is not None
    absent = unavailable(PREFIX + name)
    if absent:
        raise ModuleNotFoundError(absent)
    builder = getattr(importlib.import_module(f"minigpt_dist.verify.peers.{peer.module}"), peer.builder)
    options = {**peer.options, **({"settle": True} if peer.traits.settles_on_resume else {})}
    module = ModuleType(f"peer_{name}")
    vars(module).update({offered: getattr(builder, offered) for offered in peer.offers})
    vars(module).update(MiniGPT=MiniGPT, EXTRAS={"pieces": lambda: builder(**options).pieces()})
    return module
