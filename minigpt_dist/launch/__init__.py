"""Processes: worlds of ranks on this machine, and ranks that torch elastic started.

Owns rendezvous, deadlines, and the end of every process it starts.  Leaves what ranks compute to their bodies.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minigpt_dist.launch.client import prepare
    from minigpt_dist.launch.device import choose_backend, choose_device
    from minigpt_dist.launch.elastic import attach_elastic, under_torchrun
    from minigpt_dist.launch.errors import DeadlineExceeded, LaunchError, RankDied, RankError, RanksLost, WireError
    from minigpt_dist.launch.world import World, run_world

__all__ = [
    "DeadlineExceeded",
    "LaunchError",
    "RankDied",
    "RankError",
    "RanksLost",
    "WireError",
    "World",
    "attach_elastic",
    "choose_backend",
    "choose_device",
    "prepare",
    "run_world",
    "under_torchrun",
]

_HOMES = {
    "DeadlineExceeded": "errors",
    "LaunchError": "errors",
    "RankDied": "errors",
    "RankError": "errors",
    "RanksLost": "errors",
    "WireError": "errors",
    "World": "world",
    "attach_elastic": "elastic",
    "choose_backend": "device",
    "choose_device": "device",
    "prepare": "client",
    "run_world": "world",
    "under_torchrun": "elastic",
}


def __getattr__(name: str) -> Any:
    """Import a name when it is first asked for: the rank server can then load torch while its parent still does."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    return value
