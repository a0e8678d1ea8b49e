"""Do an implementation's ZeRO stages 2 and 3 train as one process does, and hold no more than their share of gradients and parameters?"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from minigpt_dist.verify.checks.registry import Check, register
from minigpt_dist.verify.sharded_probe import ADAM, NAMES, Stack, loss_of, sharded_body
from minigpt_dist.verify.subject import NotJudged, Subject
from minigpt_dist.verify.violation import Violation

SIZES = (2, 3)
BOUND = 1e-4  # of parameters of size 1 in float32; a gradient that is wrong by a hundredth moves them by more
UNITS, WIDTH = 20, 48
SLACK = 16384  # bytes: activations and step counts; a unit's parameters are 9,408
Case = dict[str, Any]


def case(subject: Subject, what: str, **changes: Any) -> Case:
    """One run: three units of width 5, three steps of one backward each, nothing counted, but for `changes`."""
    plain = {"units": 3, "width": 5, "tied": False, "parts": 1, "steps": 3, "bucket_mb": 0.0}
    flags = {"count": False, "discard": False, "forward_alone": False}
    return {"seed": 100_000 + subject.draw(f"sharded.{what}") % 10_000, **plain, **flags, **changes}


def asked(subject: Subject, slot: str, N: int, c: Case) -> list[dict[str, Any]]:
    """What every rank saw."""
    results = subject.ask(sharded_body, N, slot, c)
    if "not_judged" in results[0]:
        raise NotJudged(results[0]["not_judged"])
    return results


@dataclass(frozen=True)
class Right:
    """One step of one process in float64: every rank's sum of losses, and the parameters after it."""

    losses: list[float]
    values: list[torch.Tensor]


def right_steps(c: Case, N: int) -> list[Right]:
    """The mean of all ranks' gradients, and torch's AdamW."""
    model = Stack(c).double()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    steps = []
    for step in range(1, c["steps"] + 1):
        optimizer.zero_grad()
        totals = []
        for rank in range(N):
            losses = [loss_of(model, c, step, rank, part) for part in range(c["parts"])]
            totals.append(sum(loss.item() for loss in losses))
            (torch.stack(losses).sum() / N).backward()
        optimizer.step()
        steps.append(Right(totals, [p.detach().clone() for p in model.parameters()]))
    return steps


def trains(slot: str, what: str, changes: Case, subject: Subject, N: int) -> list[Violation]:
    """Every rank's loss, which shows what its forward computed with, and every parameter after every step."""
    c = case(subject, what, **changes)
    results = asked(subject, slot, N, c)
    for step, right in enumerate(right_steps(c, N), start=1):
        for rank, r in enumerate(results):
            seen, wanted = r["losses"][step - 1], right.losses[rank]
            if not abs(seen - wanted) <= BOUND * max(1.0, abs(wanted)):
                hint = "its forward computed with other weights than the last step gave"
                return [
                    Violation("the loss", f"{seen:.7g}", f"{wanted:.7g}", "gather", step=step, rank=rank, hint=hint)
                ]
        for rank, r in enumerate(results):
            found = _differing(r["values"][step - 1], right.values, c, step, rank)
            if found is not None:
                return [found]
    return []


def _differing(raw: bytes, right: list[torch.Tensor], c: Case, step: int, rank: int) -> Violation | None:
    """The first element of a parameter that is not what it should be."""
    whole = torch.cat([p.flatten() for p in right])
    if len(raw) != 4 * len(whole):
        seen, wanted = f"{len(raw)} bytes", f"{4 * len(whole)} bytes, whole"
        return Violation("what the parameters hold", seen, wanted, "gather", step=step, rank=rank)
    value = torch.frombuffer(bytearray(raw), dtype=torch.float32)
    off = (~((value.double() - whole).abs() <= BOUND)).nonzero()
    if not len(off):
        return None
    at = int(off[0])
    seen, wanted = f"{float(value[at]):.7g}", f"{float(whole[at]):.7g}"
    for name, p in Stack(c).named_parameters():
        if at < p.numel():
            stuck = step == 1 and torch.equal(value[off[0] - at :][: p.numel()], p.detach().flatten())
            hint = "it is what it was at the start: no gradient has reached it" if stuck else ""
            place: dict[str, Any] = {"step": step, "rank": rank, "tensor": name, "element": at, "hint": hint}
            break
        at -= p.numel()
    return Violation("a parameter", seen, wanted, "reduce", **place)


def counted(subject: Subject, slot: str, N: int, **changes: Any) -> tuple[list[dict[str, int]], int, int]:
    """(bytes of every rank by moment, bytes of all parameters, of a unit's)."""
    c = case(subject, "memory", units=UNITS, width=WIDTH, count=True, steps=1, **changes)
    results = subject.evidence((slot, N, *c.items()), lambda: asked(subject, slot, N, c))
    return [r["counts"] for r in results], sum(p.nbytes for p in Stack(c).parameters()), 4 * (WIDTH + 1) * WIDTH


def too_much(counts: list[dict[str, int]], when: str, most: int, least_when: str = "") -> list[Violation]:
    """More than `most` bytes at that moment, or above those of another, and the slack of all."""
    for rank, seen in enumerate(counts):
        held = seen[when] - (seen[least_when] if least_when else 0)
        if held > most + SLACK:
            beside = f", beside what it holds {least_when}" if least_when else ""
            what, limit = f"what a rank holds {when}{beside},", f"at most {most + SLACK:,}"
            return [Violation(what, f"{held:,} bytes", limit, "memory", rank=rank)]
    return []


def gradient_memory(slot: str, subject: Subject, N: int) -> list[Violation]:
    """Between backward and step: 16 bytes of state, gradient included, for each of a rank's elements, and parameters: all, or its own."""
    counts, whole, _ = counted(subject, slot, N)
    share = 4 * -(-whole // (4 * N))
    return too_much(counts, "after backward", 4 * share + (whole if slot == "zero2" else share))


def gradient_peak(slot: str, subject: Subject, N: int) -> list[Violation]:
    """While backward runs, with buckets of a unit: a slice, one bucket that fills, one that is under way, and what they are made of."""
    counts, whole, unit = counted(subject, slot, N, bucket_mb=4 * (WIDTH + 1) * WIDTH / 2**20)
    held = 4 if slot == "zero2" else 6  # and of stage 3's units the one that runs, and the next
    return too_much(counts, "in backward", -(-whole // N) + held * unit, "at rest")


def parameter_memory(slot: str, subject: Subject, N: int) -> list[Violation]:
    """Of parameters, a slice: 16 bytes an element of it at rest (weights, master copy, two moments), and three units in forward."""
    counts, whole, unit = counted(subject, slot, N)
    share = 4 * -(-whole // N)
    found = too_much(counts, "at rest", share) or too_much(counts, "after the step", share)
    return found or too_much(counts, "in forward", share + 3 * unit)


for _slot in NAMES:
    for _name, _claim, _changes in (
        ("plain", "it trains as one process does", {}),
        ("accumulation", "gradients of several backwards are added up", {"parts": 3}),
        ("tied", "a tied weight is one, and a frozen one stays", {"tied": True}),
        (
            "forgets",
            "zero_grad forgets all, also what a forward alone has left",
            {"discard": True, "forward_alone": True},
        ),
    ):
        _find = partial(trains, _slot, _name, _changes)
        register(Check(f"{_slot}.{_name}", _claim, _find, (_slot,), "reduce", SIZES))
    _claim = "of gradients, a rank keeps its slice"
    register(Check(f"{_slot}.gradients", _claim, partial(gradient_memory, _slot), (_slot,), "memory", (4,)))
    _claim = "gradients leave while backward runs"
    register(Check(f"{_slot}.peak", _claim, partial(gradient_peak, _slot), (_slot,), "memory", (4,), exotic=True))
_claim = "of parameters, a rank keeps its slice, and gathers a unit at a time"
register(Check("zero3.parameters", _claim, partial(parameter_memory, "zero3"), ("zero3",), "memory", (4,)))
