"""The questions the judge asks. Importing this package fills the registry."""

from minigpt_dist.verify.checks import (
    broadcast,
    checkpoint,
    checkpoint_crash,
    checkpoint_large,
    checkpoint_refusals,
    collectives,
    composition,
    corpus,
    ddp,
    guard,
    model,
    not_a_number,
    optimizer,
    resume,
    schedule,
)
from minigpt_dist.verify.checks.registry import CHECKS, WORLD_SIZES, Check, Verdict, judge, put

__all__ = [
    "CHECKS",
    "WORLD_SIZES",
    "Check",
    "Verdict",
    "broadcast",
    "checkpoint",
    "checkpoint_crash",
    "checkpoint_large",
    "checkpoint_refusals",
    "collectives",
    "composition",
    "corpus",
    "ddp",
    "guard",
    "judge",
    "model",
    "not_a_number",
    "optimizer",
    "put",
    "resume",
    "schedule",
]
