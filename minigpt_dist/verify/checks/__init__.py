"""The questions the judge asks. Importing this package fills the registry."""

from minigpt_dist.verify.checks import broadcast, composition, corpus, model, optimizer, resume
from minigpt_dist.verify.checks.registry import CHECKS, WORLD_SIZES, Check, Verdict, judge, put

__all__ = [
    "CHECKS",
    "WORLD_SIZES",
    "Check",
    "Verdict",
    "broadcast",
    "composition",
    "corpus",
    "judge",
    "model",
    "optimizer",
    "put",
    "resume",
]
