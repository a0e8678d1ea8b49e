"""Goals that are set before a run, in a TOML file, and whether its figures reach them.

Owns the names of figures, which way is good, and the file's strict reading. Leaves taking the figures to `profile.py`.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

WARM_UP = 2  # steps that no figure is taken from: memory is allocated, connections are made
MEMORY = ("params", "grads", "optimizer", "buffers")


@dataclass(frozen=True)
class Figure:
    """A number that a profile has. most: a goal is what it should be at most; else at least."""

    name: str
    words: str
    most: bool = True


FIGURES = (
    Figure("tokens_per_second", "tokens/s", most=False),
    Figure("step_ms_p50", "ms a step, median"),
    Figure("step_ms_p90", "ms a step, 90th percentile"),
    Figure("step_ms_p99", "ms a step, 99th percentile"),
    Figure("communication_share", "share of a step in communication"),
    *(Figure(f"{kind}_bytes", f"bytes a rank: {kind}") for kind in MEMORY),
    Figure("total_bytes", "bytes a rank, together"),
    Figure("loss", "loss after the last step"),
    Figure("drift_steps", "steps with a number that drifted"),
    Figure("price_per_million_tokens", "price of a million tokens"),
)
BY_NAME = {figure.name: figure for figure in FIGURES}


def read_goals(path: Path) -> dict[str, float]:
    """Name of a figure -> goal, from the file's table [goals]. OSError, or ValueError that says what is wrong with the file."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # TOMLDecodeError and UnicodeDecodeError are
        raise ValueError(f"goals is {str(path)!r}, but should be a TOML file: {error}") from None
    goals = content.get("goals")
    if set(content) != {"goals"} or not isinstance(goals, dict) or not goals:
        raise ValueError(f"goals is {str(path)!r}, but should be a file with one table, [goals]")
    for name, goal in goals.items():
        if name not in BY_NAME:
            raise ValueError(f"goal is {name!r}, but should be one of {', '.join(BY_NAME)}")
        if isinstance(goal, bool) or not isinstance(goal, (int, float)) or not 0 <= goal < math.inf:
            raise ValueError(f"{name} is {goal!r}, but should be a finite number of at least 0")
    return {name: float(goal) for name, goal in goals.items()}


def met(name: str, value: float, goal: float) -> bool:
    """Whether `value` reaches the goal; one that is not a number does not."""
    return value <= goal if BY_NAME[name].most else value >= goal
