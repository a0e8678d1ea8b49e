"""Which part of a step to blame when a run ends in an error instead of evidence.

Owns the reading of tracebacks and of the calls that ranks are stuck in. Leaves the message to `checks/registry.py`.
"""

from __future__ import annotations

import re

from minigpt_dist.launch import DeadlineExceeded, RankError

# The judge's own lines that call into an implementation, and the stage that each is.
_CALLS = (
    (r"\.load_state_dict\(|load_sharded|pieces\.load\(", "load"),
    (r"\.state_dict\(\)|save_sharded|pieces\.save\(|in capture", "save"),
    (r"in load_state_dict", "load"),
    (r"in state_dict", "save"),
    (r"broadcast_parameters|in broadcast", "broadcast"),
    (r"loss\.backward\(", "backward"),
)
_COMMUNICATION = (
    (("reduce_scatter", "all_reduce", "all_to_all", "reduce"), "reduce"),
    (("all_gather", "_all_gather_base"), "gather"),
    (("gather_object", "barrier", "monitored_barrier"), "save"),
)


def stage_of(error: Exception, default: str) -> str:
    """The stage in which a run broke: where the traceback shows it, or by the communication that ranks wait in; else `default`."""
    if isinstance(error, RankError):
        return next((stage for pattern, stage in _CALLS if re.search(pattern, error.traceback)), default)
    if isinstance(error, DeadlineExceeded) and default in ("optimizer", "gather", "memory"):
        stacks = "\n".join(error.stacks.values())
        for pattern, stage in _CALLS:
            if re.search(pattern, stacks):
                return stage
        calls = [call for _, call, _ in error.waiting]
        for names, stage in _COMMUNICATION:
            if any(call.startswith(name) for call in calls for name in names):
                return stage
    return default
