"""The lesson's invariants of losses, norms and bytes, and what stands beside them, over the composed run.

Leaves what is about memory to `composed_memory.py`, and the fourth, about a resumed run, to `resume.py`.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from minigpt_dist.trace import Record, Trace
from minigpt_dist.verify.checks.composed_memory import live_bytes_flat, optimizer_bytes
from minigpt_dist.verify.checks.registry import Check, register
from minigpt_dist.verify.composition import Composed, asked_config, evidence_of, oracle
from minigpt_dist.verify.subject import Subject
from minigpt_dist.verify.violation import Violation

# Float noise of a float32 mean loss of about 4: one rounding is 4.8e-7; correct runs that differ in reduction order
# differ by at most 2.0e-7 relative. The smallest fall between two steps, over 40 seeds and N = 1, 2, 3, 4, 8, is 0.0155:
# four orders above this.
LOSS_NOISE = 1e-6
# The loss of correct runs against the one-process oracle, 20 steps, float32: at most 2.0e-7 relative; the smallest visible fault 9.5e-5.
LOSS_REL = 5e-6
# Relative Frobenius error of one tensor after 20 steps, float32: at most 2.9e-5 for correct runs.
FINAL_REL = 3e-4


def loss_falls(subject: Subject, world_size: int) -> list[Violation]:
    """(a) The mean loss falls at every one of the 20 steps."""
    return falling(evidence_of(subject, world_size).whole)


def falling(trace: Trace) -> list[Violation]:
    """The first step whose mean loss is above the step before, beyond float noise; or missing, or not finite."""
    losses = trace.mean_losses()
    previous = math.inf
    for step, loss in losses.items():
        if not loss <= previous + LOSS_NOISE:
            return [
                Violation(
                    "the mean loss",
                    f"{loss:.6f}",
                    f"at most {previous:.6f}, the loss of step {step - 1}",
                    "optimizer",
                    step=step,
                )
            ]
        previous = loss
    return []


def norms_agree(subject: Subject, world_size: int) -> list[Violation]:
    """(b) Every rank holds the same parameter norm at every step, exactly, and the same bytes."""
    return replicas_agree(evidence_of(subject, world_size).whole)


def replicas_agree(trace: Trace) -> list[Violation]:
    """The first step and rank at which a parameter or buffer differs from rank 0's."""
    for step in trace.steps:
        records = trace.at(step)
        stage = "broadcast" if step == 0 else "gather"
        for r in records[1:]:
            for name, seen in r.params.items():
                wanted = records[0].params.get(name)
                if seen != wanted:
                    return [
                        Violation(
                            "the parameter's bytes (sha256)",
                            seen[:16],
                            f"{str(wanted)[:16]}, as on rank 0",
                            stage,
                            step=step,
                            rank=r.rank,
                            tensor=name,
                            hint=_norm_hint(records[0], r),
                        )
                    ]
            if r.param_norm != records[0].param_norm:
                return [
                    Violation(
                        "the parameter norm",
                        f"{r.param_norm!r}",
                        f"{records[0].param_norm!r}, as on rank 0",
                        stage,
                        step=step,
                        rank=r.rank,
                    )
                ]
    return []


def _norm_hint(first: Record, other: Record) -> str:
    if first.param_norm == other.param_norm:
        return "the norms of all parameters agree: only bytes show this difference"
    return f"parameter norm {other.param_norm:.9g}, on rank 0 {first.param_norm:.9g}"


def matches_oracle(subject: Subject, world_size: int) -> list[Violation]:
    """Losses at every step, and parameters, equal the one-process run's: ours bit for bit."""
    evidence = evidence_of(subject, world_size)
    right = oracle(subject, asked_config(subject, world_size))
    if subject.ours:
        return _close_losses(evidence.whole, right["losses"], 0.0) or _same_bits(evidence.whole, right["digests"])
    return near_one_process(evidence, right)


def near_one_process(evidence: Composed, right: dict[str, Any]) -> list[Violation]:
    """Losses at every step and parameters at the end, within what the order of sums may change in float32."""
    return _close_losses(evidence.whole, right["losses"], LOSS_REL) or _close_finals(evidence, right["final"])


def _close_losses(trace: Trace, losses: list[list[float]], relative: float) -> list[Violation]:
    for record in trace.records:
        if not record.step:
            continue
        wanted = losses[record.step - 1][record.rank]
        if not abs(record.loss - wanted) <= relative * abs(wanted):
            return [
                Violation(
                    "the loss",
                    f"{record.loss!r}",
                    f"{wanted!r}, as in one process",
                    "forward",
                    step=record.step,
                    rank=record.rank,
                )
            ]
    return []


def _same_bits(trace: Trace, digests: list[dict[str, str]]) -> list[Violation]:
    for record in trace.records:
        for name, wanted in digests[record.step].items():
            if record.params[name] != wanted:
                return [
                    Violation(
                        "the parameter's bytes (sha256)",
                        record.params[name][:16],
                        f"{wanted[:16]}, as in one process",
                        "optimizer",
                        step=record.step,
                        rank=record.rank,
                        tensor=name,
                    )
                ]
    return []


def _close_finals(evidence: Composed, right: dict[str, bytes]) -> list[Violation]:
    for rank, finals in enumerate(evidence.finals):
        for name, raw in finals.items():
            a = torch.frombuffer(bytearray(raw), dtype=torch.float32).double()
            b = torch.frombuffer(bytearray(right[name]), dtype=torch.float32).double()
            off = float((a - b).norm() / b.norm().clamp_min(1e-30))
            if not off <= FINAL_REL:
                return [
                    Violation(
                        "the parameter after 20 steps (relative error)",
                        f"{off:.3g}",
                        f"at most {FINAL_REL:g} from one process",
                        "optimizer",
                        step=evidence.config.steps,
                        rank=rank,
                        tensor=name,
                    )
                ]
    return []


def tokens_once(subject: Subject, world_size: int) -> list[Violation]:
    """Every block of the corpus is read by one rank once."""
    evidence = evidence_of(subject, world_size)
    seen: dict[tuple[int, ...], tuple[int, int]] = {}
    for record in evidence.whole.records:
        if record.step == 0:
            continue
        wanted = evidence.config.batch * evidence.config.model.seq_len * evidence.config.micro_batches
        if len(record.tokens) != wanted:
            return [
                Violation(
                    "tokens read", f"{len(record.tokens)}", f"{wanted}", "data", step=record.step, rank=record.rank
                )
            ]
        key = (record.step, *record.tokens)
        if key in seen:
            return [
                Violation(
                    "the batch",
                    f"the one of rank {seen[key][1]}",
                    "its own",
                    "data",
                    step=record.step,
                    rank=record.rank,
                )
            ]
        seen[key] = (record.step, record.rank)
    return []


POINT_TO_POINT = frozenset({"send", "recv", "isend", "irecv", "batch_isend_irecv"})
SAME_SIZE = frozenset(
    {"all_reduce", "broadcast"}
)  # where all ranks pass the same tensor; a shard's size may differ by rank


def same_collectives(subject: Subject, world_size: int) -> list[Violation]:
    """All ranks call the same collectives in the same order, with the same sizes where these cannot differ."""
    return calls_agree(evidence_of(subject, world_size).whole)


def calls_agree(trace: Trace) -> list[Violation]:
    """The first collective in which a rank differs from rank 0."""
    for step in trace.steps:
        records = trace.at(step)
        first = _calls(records[0])
        for r in records[1:]:
            mine = _calls(r)
            if mine != first:
                at = next(
                    (i for i, (a, b) in enumerate(zip(mine, first, strict=False)) if a != b), min(len(mine), len(first))
                )
                return [
                    Violation(
                        f"collective {at} of the step",
                        str(mine[at : at + 1]),
                        f"{first[at : at + 1]}, as on rank 0",
                        "reduce",
                        step=step,
                        rank=r.rank,
                    )
                ]
    return []


def _calls(record: Record) -> list[tuple[Any, ...]]:
    calls = [c for c in record.collectives if c["op"] not in POINT_TO_POINT]
    return [(c["op"], c["dtype"], c["numel"] if c["op"] in SAME_SIZE else None) for c in calls]


ALL_SLOTS = ("model", "broadcast", "optimizer")
for _name, _claim, _find, _stage in (
    ("monotone_loss", "the mean loss falls at every step", loss_falls, "optimizer"),
    ("param_norms", "every rank holds the same parameters at every step", norms_agree, "gather"),
    ("optimizer_bytes", "optimizer memory is 12P/N bytes a rank", optimizer_bytes, "memory"),
    ("oracle", "the run equals one process at every step", matches_oracle, "optimizer"),
    ("tokens_once", "every block of the corpus is read by one rank once", tokens_once, "data"),
    ("same_collectives", "all ranks call the same collectives in the same order", same_collectives, "reduce"),
    ("live_bytes", "no memory grows with the steps", live_bytes_flat, "memory"),
):
    register(Check(_name, _claim, _find, ALL_SLOTS, _stage, through=("ddp",)))
