"""Putting a drawn scenario or configuration to an implementation: what a property test asks."""

from __future__ import annotations

from minigpt_dist.config import TrainConfig
from minigpt_dist.verify.checks.optimizer import optimizer_matches
from minigpt_dist.verify.checks.registry import Check, put
from minigpt_dist.verify.checks.resume import resume_violations
from minigpt_dist.verify.composition import composed
from minigpt_dist.verify.scenario import Scenario
from minigpt_dist.verify.subject import Subject


def fuzz_verdict(subject: Subject, scenario: Scenario, world_size: int) -> str:
    """The message of the first violation under `scenario`, "" if there is none."""
    ask = Check(
        "optimizer.fuzz", scenario.why, lambda s, n: optimizer_matches(s, n, scenario), ("optimizer",), "optimizer"
    )
    return put(ask, subject, world_size).render(subject.spec)


def resume_verdict(subject: Subject, config: TrainConfig) -> str:
    """The message of the first byte lost by a resume under `config`, "" if there is none."""
    ask = Check("resume_bytes.fuzz", "", lambda s, n: resume_violations(composed(s, config)), ("checkpoint",), "load")
    return put(ask, subject, config.world_size).render(subject.spec)
