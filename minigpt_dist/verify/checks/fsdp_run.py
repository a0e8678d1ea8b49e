"""The lesson's four invariants, and what stands beside them, over a composed run through a fully sharded wrapper.

The questions are those of `composition.py` and `resume.py`, put to another run: sizes that 1 to 4 ranks divide, no biases.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from minigpt_dist.config import ModelConfig, TrainConfig
from minigpt_dist.memory import zero1_bytes
from minigpt_dist.model import MiniGPT
from minigpt_dist.verify.checks.composed_memory import growth
from minigpt_dist.verify.checks.composition import calls_agree, falling, near_one_process, replicas_agree
from minigpt_dist.verify.checks.registry import Check, register
from minigpt_dist.verify.checks.resume import resume_violations
from minigpt_dist.verify.composition import Composed, composed, oracle_of
from minigpt_dist.verify.fsdp_probe import biasless, sharded_run_body
from minigpt_dist.verify.subject import NotJudged, Subject
from minigpt_dist.verify.violation import Violation

SIZES = ModelConfig(vocab=60, embed_dim=24, num_heads=4, seq_len=12)  # 12 divides every first dimension
BATCH = 5  # 5 * 12 = 60: each batch has every transition of the corpus once


def _config(subject: Subject, world_size: int) -> TrainConfig:
    number, plain = (
        subject.draw(f"fsdp run at {world_size}"),
        TrainConfig(world_size=world_size, model=SIZES, batch=BATCH),
    )
    return (
        replace(plain, seed=number % 100_000, lr=plain.lr * (0.9 + 0.2 * (number % 1009) / 1008)) if number else plain
    )


def _evidence(subject: Subject, world_size: int) -> Composed:
    return composed(subject, _config(subject, world_size), sharded_run_body)


@functools.lru_cache(maxsize=16)
def _oracle(config: TrainConfig) -> dict[str, Any]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed * 1009)
        return oracle_of(
            biasless(MiniGPT(**{n: getattr(config.model, n) for n in config.model.__dataclass_fields__})), config
        )


def loss_falls(evidence: Composed) -> list[Violation]:
    """(a) The mean loss falls at every step."""
    return falling(evidence.whole)


def norms_agree(evidence: Composed) -> list[Violation]:
    """(b) Every rank gathers the same parameters at every step."""
    return replicas_agree(evidence.whole)


def state_bytes(evidence: Composed) -> list[Violation]:
    """(c) Beside parameters and gradients a rank holds two moments of its share, and at most a master copy: 8P/N to 12P/N bytes."""
    numels = [torch.Size(shape).numel() for shape in evidence.shapes.values()]
    small = sum(torch.Size(shape).numel() for shape in evidence.shapes.values() if len(shape) == 1)
    most = zero1_bytes(sum(numels), evidence.whole.world_size) + 12 * small + 1024
    for record in evidence.whole.counted():
        if record.bytes["optimizer"] > most:
            seen, wanted = f"{record.bytes['optimizer']} bytes", f"at most {most} (12P/N, with norms whole)"
            return [Violation("optimizer memory", seen, wanted, "memory", step=record.step, rank=record.rank)]
    return []


def equals_one_process(evidence: Composed) -> list[Violation]:
    """Losses at every step, and parameters at the end, equal the one-process run's."""
    return near_one_process(evidence, _oracle(evidence.config))


def same_calls(evidence: Composed) -> list[Violation]:
    """All ranks call the same collectives in the same order."""
    return calls_agree(evidence.whole)


def no_growth(evidence: Composed) -> list[Violation]:
    """No kind of memory grows from the second step on."""
    return growth(evidence.whole)


def _check(name: str, claim: str, find: Callable[[Composed], list[Violation]], stage: str) -> Check:
    def asked(subject: Subject, world_size: int) -> list[Violation]:
        try:
            return find(_evidence(subject, world_size))
        except Exception as error:
            if getattr(error, "kind", "") == "LookupError":
                raise NotJudged(str(getattr(error, "message", error))) from error
            raise

    return Check(f"fsdp.{name}", claim, asked, ("fsdp",), stage, world_sizes=(1, 2, 3, 4))


for _row in (
    ("loss", "the mean loss falls at every step", loss_falls, "optimizer"),
    ("norms", "every rank gathers the same parameters at every step", norms_agree, "gather"),
    ("bytes", "optimizer memory is 8P/N, or 12P/N with a master copy", state_bytes, "memory"),
    ("oracle", "the run equals one process at every step", equals_one_process, "optimizer"),
    ("resume", "each rank's own state resumes byte-equal and trains on to the same bytes", resume_violations, "load"),
    ("order", "all ranks call the same collectives in the same order", same_calls, "reduce"),
    ("live", "no memory grows with the steps", no_growth, "memory"),
):
    register(_check(*_row))
