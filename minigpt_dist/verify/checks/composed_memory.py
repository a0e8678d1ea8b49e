"""What the composed run may hold: the optimizer's share on every rank, and nothing that grows with the steps."""

from __future__ import annotations

from minigpt_dist.memory import zero1_bytes
from minigpt_dist.trace import Trace
from minigpt_dist.verify.checks.optimizer_memory import allowed
from minigpt_dist.verify.composition import Composed, evidence_of
from minigpt_dist.verify.extra_bytes import hint_of
from minigpt_dist.verify.peers.traits import Traits
from minigpt_dist.verify.peers.traits import optimizer_bytes as state_bytes
from minigpt_dist.verify.subject import Subject
from minigpt_dist.verify.violation import Violation


def optimizer_bytes(subject: Subject, world_size: int) -> list[Violation]:
    """(c) Optimizer memory is 12P/N bytes on every rank at every step: exactly ours; others may pad, or own whole parameters (8P/N)."""
    evidence = evidence_of(subject, world_size)
    if subject.traits is not None:
        return peer_bytes(subject.traits, evidence)
    P = sum(len(raw) // 4 for raw in evidence.finals[0].values())
    share = zero1_bytes(P, world_size)
    most = share if subject.ours else allowed(share)
    if (
        evidence.averages_outside
    ):  # whole parameters have owners: together one copy; how even that is, optimizer.balanced asks
        most = allowed(8 * P) + max(evidence.bucket_bytes)
    for record in evidence.whole.counted():
        held = record.bytes["optimizer"]
        if held > most or (subject.ours and record.step and held != share):
            together = [r.bytes["optimizer"] for r in evidence.whole.at(record.step)]
            later = max(r.bytes["optimizer"] for r in evidence.whole.counted()) if record.step else 0
            hint = hint_of(together, P, share, later)
            return [
                Violation(
                    "optimizer memory",
                    f"{held} bytes",
                    f"{share} bytes (12P/N with P = {P}, N = {world_size})",
                    "memory",
                    step=record.step,
                    rank=record.rank,
                    hint=hint,
                )
            ]
    total = sum(r.bytes["optimizer"] for r in evidence.whole.at(evidence.whole.steps[-1]))
    if evidence.averages_outside and total > world_size * allowed(8 * P // world_size) + sum(evidence.bucket_bytes):
        return [
            Violation(
                "optimizer memory over all ranks",
                f"{total} bytes",
                f"{8 * P} (two float32 moments, once)",
                "memory",
                hint="it is not sharded",
            )
        ]
    if total < 8 * P:
        return [
            Violation(
                "optimizer memory over all ranks", f"{total} bytes", f"at least {8 * P} (two float32 moments)", "memory"
            )
        ]
    return []


def peer_bytes(traits: Traits, evidence: Composed) -> list[Violation]:
    """A peer holds, on every rank from the first update on, exactly the bytes that follow from its own rule."""
    wanted = state_bytes(traits, evidence.shapes, evidence.whole.world_size)
    observed = [
        (r.step, r.rank, r.bytes["optimizer"] + (r.bytes["params"] if traits.sharded_parameters else 0))
        for r in evidence.whole.counted()
        if r.step
    ]
    if traits.buffers:
        observed = [(evidence.config.steps, rank, state) for rank, state in enumerate(evidence.state_bytes)]
    for step, rank, held in observed:
        if held != wanted[rank]:
            expected = f"{wanted[rank]} bytes ({traits.bytes_per_element} an element it owns)"
            return [Violation("optimizer memory", f"{held} bytes", expected, "memory", step=step, rank=rank)]
    return []


def live_bytes_flat(subject: Subject, world_size: int) -> list[Violation]:
    """No kind of memory grows from the second step on."""
    return growth(evidence_of(subject, world_size).whole)


def growth(trace: Trace) -> list[Violation]:
    """The first record after the second step that holds more of a kind than the second."""
    settled = {r.rank: r.bytes for r in trace.at(2)}
    for record in trace.records:
        for kind, held in record.bytes.items():
            if record.step > 2 and held > settled[record.rank][kind]:
                return [
                    Violation(
                        f"bytes of {kind}",
                        f"{held}",
                        f"{settled[record.rank][kind]}, as after step 2",
                        "memory",
                        step=record.step,
                        rank=record.rank,
                        hint="something is kept at every step",
                    )
                ]
    return []
