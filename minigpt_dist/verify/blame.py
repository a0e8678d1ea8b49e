"""Which part of a step to blame when a run ends in an error instead of evidence.

Owns the reading of stacks and of the calls that ranks are stuck in or died in, and of the piece that is not written yet. Leaves the
message to `checks/registry.py`.
"""

from __future__ import annotations

import re

from minigpt_dist.launch import DeadlineExceeded, LaunchError, RankDied, RankError

# What a stack shows of the judge's own calls, and the stage that each is; the first that fits counts.
_FRAMES = (
    (r"in load_state_dict|\.load_state_dict\(|in load_sharded|in restore_state", "load"),
    (r"in state_dict|\.state_dict\(\)|in save_sharded|in capture", "save"),
    (r"in broadcast_parameters", "broadcast"),
    (r"\.backward\(|in backward", "backward"),
)
# Names of collectives, and what they are mostly called for. In one step a gather follows a reduction: a rank that waits in a gather
# while another waits in a reduction is the one behind.
_CALLS = (
    (r"new_group|init_process_group", "launch"),
    (r"all_gather\w*|_all_gather_base", "gather"),
    (r"all_reduce\w*|reduce\w*|_reduce_scatter_base|all_to_all\w*|broadcast|barrier", "reduce"),
)
_OF_A_STEP = ("optimizer", "reduce", "gather", "memory")


def stage_of(error: LaunchError, default: str) -> str:
    """The stage in which a run broke: by the frames of its stacks, or by the communication it broke in; `default` if neither tells."""
    stacks, calls = _evidence(error)
    for pattern, stage in _FRAMES:
        if re.search(pattern, stacks):
            return stage
    if default in _OF_A_STEP:
        for pattern, stage in _CALLS:
            if any(re.fullmatch(pattern, call) for call in calls):
                return stage
    return default


def unwritten(error: RankError) -> str:
    """The name of the stub that raised NotImplementedError; "" for any other error, and for one that refuses something in particular."""
    if error.kind != "NotImplementedError":
        return ""
    named = re.fullmatch(r"([\w.]+) is not (?:written|implemented)(?: yet)?\.?", error.message.strip())
    if named:
        return named[1]
    stub = not error.message.strip() or re.match(
        r"(?i)\W*(todo|implement|your code|fill in|not (yet )?implemented)", error.message
    )
    frames = re.findall(r"File .*, in (\S+)", error.traceback)
    return frames[-1] if stub and frames else ""


def raised_by_itself(error: RankError) -> bool:
    """Does the stack end at a `raise` or `assert` of the implementation's own, rather than in what it calls or in the judge?"""
    frames = re.findall(r'File "([^"]*)", line \d+, in \S+\n\s*(.*)', error.traceback)
    if not frames:
        return False
    place, statement = frames[-1]
    theirs = not re.search(r"/(torch|site-packages|minigpt_dist/verify)/", place)
    return theirs and statement.startswith(("raise ", "assert "))


def _evidence(error: LaunchError) -> tuple[str, list[str]]:
    """(stacks as text, names of the communication calls in question)."""
    if isinstance(error, RankError):
        return error.traceback, []
    if isinstance(error, DeadlineExceeded):
        return "\n".join(error.stacks.values()), [call for _, call, _ in error.waiting]
    if isinstance(error, RankDied):
        return str(error), re.findall(r"its last collective: (\w+)", str(error))
    return "", []
