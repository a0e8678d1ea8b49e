"""A plan as a file: one JSON object that says what to train, spread how, and what was predicted.

Owns the format, and its strict reading. Leaves what a run makes of it to `train --plan`.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from minigpt_dist.config import ModelConfig
from minigpt_dist.layout import Layout
from minigpt_dist.planner.search import Plan
from minigpt_dist.planner.shape import ModelShape
from minigpt_dist.require import require_count

SCHEMA = "minigpt-dist-plan/1"
KEYS = ("schema", "architecture", "model", "layout", "batch", "predicted")
MAX_BYTES = 2**20


@dataclass(frozen=True)
class SavedPlan:
    """What a file holds. batch: sequences a micro-batch."""

    shape: ModelShape
    layout: Layout
    batch: int


def write_plan(path: Path, shape: ModelShape, plan: Plan) -> None:
    """Put `plan` at `path`, whole or not at all. OSError if it cannot be written."""
    predicted = {name: value for name, value in plan.to_dict().items() if name not in ("layout", "batch")}
    content = {
        "schema": SCHEMA,
        "architecture": shape.architecture,
        "model": asdict(shape.sizes),
        "layout": asdict(plan.layout),
        "batch": plan.batch,
        "predicted": predicted,
    }
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def read_plan(path: Path) -> SavedPlan:
    """What `write_plan` wrote. OSError for a file that cannot be read, ValueError for one that is no plan."""
    with open(path, "rb") as file:
        raw = file.read(MAX_BYTES + 1)
    try:
        content = json.loads(raw)
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        raise ValueError(f"plan is {str(path)!r}, but should be a file of schema {SCHEMA}")
    if sorted(content) != sorted(KEYS):
        raise ValueError(f"keys of {str(path)!r} are {sorted(content)}, but should be {sorted(KEYS)}")
    sizes = ModelConfig(**_fields(content["model"], ModelConfig, "model"))
    layout = Layout(**_fields(content["layout"], Layout, "layout"))
    layout.require_fits(sizes, layout.world_size)
    require_count("batch", content["batch"])
    return SavedPlan(ModelShape.of(content["architecture"], sizes), layout, content["batch"])


def _fields(found: Any, kind: type[ModelConfig] | type[Layout], what: str) -> dict[str, Any]:
    """`found`, if it has a value of the right type for every field of `kind`, and nothing else."""
    wanted = {f.name: type(f.default) for f in fields(kind)}
    if not isinstance(found, dict) or sorted(found) != sorted(wanted):
        raise ValueError(f"{what} of the plan is {found!r:.80}, but should be an object of {', '.join(wanted)}")
    for name, value in found.items():
        if type(value) is not wanted[name]:
            raise ValueError(f"{name} of the plan is {value!r:.80}, but should be of type {wanted[name].__name__}")
    return dict(found)
