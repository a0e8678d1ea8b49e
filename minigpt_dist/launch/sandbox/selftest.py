"""Does a mode of isolation hold on this machine? Tried, not believed: each self-test starts a sandbox and attacks it.

Owns what a mode must withstand. Leaves the attempts to `trial.py`.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from minigpt_dist.launch import trial
from minigpt_dist.launch.client import ServerHandle
from minigpt_dist.launch.errors import LaunchError
from minigpt_dist.launch.limits import Limits
from minigpt_dist.launch.sandbox import bwrap
from minigpt_dist.launch.sandbox.contents import Contents
from minigpt_dist.launch.sandbox.isolation import Isolation
from minigpt_dist.launch.sandbox.jail import Jail
from minigpt_dist.launch.sandbox.kits import launch_kit
from minigpt_dist.launch.world import run_world

__all__ = ["failure_of"]

_DEADLINE_S = 30.0
_PROCESSES = 40
_MOST, _HEAD = 400, 100  # characters of a reason


def failure_of(mode: str) -> str | None:
    """Why `mode` does not hold here, in a line; None if it does."""
    if mode == "bwrap" and bwrap.available() is None:
        return "bubblewrap is not installed"
    kit = Contents(launch_kit())
    try:
        server = ServerHandle("fork", Jail(Isolation(mode), kit, Limits(processes=_PROCESSES)))
    except (LaunchError, OSError, ValueError) as error:
        return str(error).splitlines()[0]
    try:
        return _first_breach(mode, server)
    except LaunchError as error:
        return shorten(" ".join(str(error).split()))
    finally:
        server.close()


def shorten(text: str) -> str:
    """A line's beginning and its end, where the reason for an error stands."""
    return text if len(text) <= _MOST else f"{text[:_HEAD]} [...] {text[_HEAD - _MOST :]}"


def _first_breach(mode: str, server: ServerHandle) -> str | None:
    sums = run_world(trial.gather_body, 2, deadline_s=_DEADLINE_S, server=server)
    if sums != [3.0, 3.0]:
        return f"an all_reduce of 2 ranks gave {sums}"
    if mode != "uid" and (address := run_world(trial.route_body, 1, deadline_s=_DEADLINE_S, server=server)[0]):
        return f"there is a route out, from {address}"
    with tempfile.TemporaryDirectory(prefix="minigpt-dist-") as folder:
        secret = Path(folder, "secret")
        secret.write_text("secret")
        if run_world(trial.secret_body, 1, str(secret), deadline_s=_DEADLINE_S, server=server)[0]:
            return "a file outside can be read"
    made = run_world(trial.swarm_body, 1, 2 * _PROCESSES, deadline_s=_DEADLINE_S, server=server)[0]
    return f"{made} processes could be forked, where {_PROCESSES} are allowed" if made > _PROCESSES else None
