"""Does broadcast_parameters give every rank the source's parameters and buffers, and leave the source as it was?"""

from __future__ import annotations

import hashlib
from typing import Any

from minigpt_dist.verify.broadcast_probe import OddLayouts, Zoo, broadcast_body, contents
from minigpt_dist.verify.checks.registry import Check, register
from minigpt_dist.verify.subject import NotJudged, Subject
from minigpt_dist.verify.violation import Violation


def _check(subject: Subject, world_size: int, src: int, odd: bool = False) -> list[Violation]:
    seed = 100 + subject.draw("broadcast")
    results = subject.ask(broadcast_body, world_size, seed, src, odd)
    if "not_judged" in results[0]:
        raise NotJudged(results[0]["not_judged"])
    before = [contents((OddLayouts if odd else Zoo)(seed + rank)) for rank in range(world_size)]
    wanted = before[src]
    for rank, r in enumerate(results):
        for name, value in wanted.items():
            seen = r["after"].get(name)
            if seen != value:
                unchanged = seen == before[rank].get(name)
                hint = "it still has the value of this rank's own seed" if unchanged and rank != src else ""
                if rank == src:
                    hint = "the source itself was changed"
                return [
                    Violation(
                        "the tensor's bytes after the broadcast (sha256)",
                        _told(seen),
                        f"{_told(value)}, rank {src}'s",
                        "broadcast",
                        step=0,
                        rank=rank,
                        tensor=name,
                        hint=hint,
                    )
                ]
        if r["replaced"]:
            name = r["replaced"][0]
            return [
                Violation(
                    "the parameter",
                    "another object than before",
                    "the same, with new values",
                    "broadcast",
                    step=0,
                    rank=rank,
                    tensor=name,
                    hint="ties, hooks and optimizers made before are cut off",
                )
            ]
        if not r["mode_kept"]:
            return [Violation("the module's training mode", "changed", "as before", "broadcast", step=0, rank=rank)]
        if "frozen" in r["trainable"]:
            return [
                Violation(
                    "requires_grad of a frozen parameter",
                    "True",
                    "False, as before",
                    "broadcast",
                    step=0,
                    rank=rank,
                    tensor="frozen",
                )
            ]
    return []


def _told(content: Any) -> str:
    """The start of the digest of a tensor's dtype, shape and bytes."""
    return hashlib.sha256(repr(content).encode()).hexdigest()[:16]


def broadcast_from_first(subject: Subject, world_size: int) -> list[Violation]:
    """Everything of rank 0 reaches all ranks, bit for bit."""
    return _check(subject, world_size, 0)


def broadcast_from_last(subject: Subject, world_size: int) -> list[Violation]:
    """The same from the last rank."""
    return _check(subject, world_size, world_size - 1)


def broadcast_of_odd_layouts(subject: Subject, world_size: int) -> list[Violation]:
    """Parameters that are not contiguous, and empty ones, reach all ranks, or are refused aloud."""
    return _check(subject, world_size, 0, odd=True)


register(
    Check(
        "broadcast.layouts",
        "tensors that are not contiguous reach every rank",
        broadcast_of_odd_layouts,
        ("broadcast",),
        "broadcast",
        world_sizes=(2, 3),
        exotic=True,
    )
)
register(
    Check(
        "broadcast.first",
        "parameters and buffers of rank 0 reach every rank",
        broadcast_from_first,
        ("broadcast",),
        "broadcast",
    )
)
register(
    Check(
        "broadcast.last",
        "src chooses the rank that is copied",
        broadcast_from_last,
        ("broadcast",),
        "broadcast",
        world_sizes=(2, 3, 4),
    )
)
