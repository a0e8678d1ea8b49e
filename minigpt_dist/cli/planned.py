"""`train --plan FILE`: a saved plan as options of a run.

Owns what a run calls the plan's numbers. Leaves the format to `planner/saved.py`.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from minigpt_dist.cli.usage import UsageError
from minigpt_dist.planner.saved import SavedPlan, read_plan

IN_OTHER_WORDS = {"precision": "dtype"}  # a layout's field -> the run's


def take_plan(given: dict[str, Any], path: Path) -> None:
    """Add the plan's values to the options given, in place.

    UsageError for a file that is no plan, a layout that `train` does not carry out, or an option that says otherwise.
    """
    try:
        plan = read_plan(path)
    except OSError as error:
        raise UsageError(f"plan is {str(path)!r} ({error.strerror}), but should be a readable file") from None
    except ValueError as error:
        raise UsageError(str(error)) from None
    for name, value in options_of(plan).items():
        if given.setdefault(name, value) != value:
            raise UsageError(f"{name} is {given[name]!r}, but should be {value!r}, as in the plan")


def options_of(plan: SavedPlan) -> dict[str, Any]:
    """The plan in fields of TrainConfig and ModelConfig. UsageError for a model that `train` does not have."""
    if plan.shape.architecture != "minigpt":
        raise UsageError(
            f"architecture is {plan.shape.architecture!r}, but should be 'minigpt', the one that train has"
        )
    layout = {IN_OTHER_WORDS.get(name, name): value for name, value in asdict(plan.layout).items() if name != "dp"}
    return {**asdict(plan.shape.sizes), **layout, "world_size": plan.layout.world_size, "batch": plan.batch}
