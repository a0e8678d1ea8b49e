"""Sandboxes: a rank server, and the ranks it forks, held apart from the machine.

Owns the choice of a mode, what a sandbox contains, its limits and its end. Leaves serving ranks to `launch/server.py`, which runs inside,
and what a submission needs there to whoever judges it.
"""

from minigpt_dist.launch.sandbox.contents import Contents
from minigpt_dist.launch.sandbox.isolation import MODES, Isolation, IsolationError, choose
from minigpt_dist.launch.sandbox.jail import Jail

__all__ = ["MODES", "Contents", "Isolation", "IsolationError", "Jail", "choose"]
