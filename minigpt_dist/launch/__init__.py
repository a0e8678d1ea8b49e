"""Processes: worlds of ranks on this machine, and ranks that torch elastic started.

Owns rendezvous, deadlines, and the end of every process it starts.  Leaves what ranks compute to their bodies.
"""

from minigpt_dist.launch.device import choose_backend, choose_device
from minigpt_dist.launch.elastic import attach_elastic, under_torchrun
from minigpt_dist.launch.errors import DeadlineExceeded, LaunchError, RankDied, RankError, WireError
from minigpt_dist.launch.world import World, run_world

__all__ = [
    "DeadlineExceeded",
    "LaunchError",
    "RankDied",
    "RankError",
    "WireError",
    "World",
    "attach_elastic",
    "choose_backend",
    "choose_device",
    "run_world",
    "under_torchrun",
]
