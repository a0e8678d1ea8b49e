"""Does a data-parallel wrapper start all ranks alike and leave the mean gradient in p.grad?"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from minigpt_dist.verify.adam_oracle import mean_gradient
from minigpt_dist.verify.checks.registry import Check, register
from minigpt_dist.verify.ddp_probe import construction_body, ddp_body
from minigpt_dist.verify.gradient_hint import explain_gradient
from minigpt_dist.verify.gradients import initial_value
from minigpt_dist.verify.scenario import BY_NAME, Scenario
from minigpt_dist.verify.subject import NotJudged, Subject
from minigpt_dist.verify.violation import Violation

# The sums over ranks are exact in float32; what is left is one rounding of the division (before or after): 2 ulp.
GRAD_REL = 2.5e-7
GRAD_REL_FLOAT64 = 1e-15
# torch's own wrapper refuses the last, unless told to look for unused parameters; so may others.
EXOTIC = frozenset({"transposed", "empty_tensor", "float64", "unused_on_one", "mixed"})
# Most wrappers wait for the rank that has no gradient, which is told and costs nothing: no longer than shows it.
MAY_STOP, STOPS_AFTER_S = ("unused_on_one",), 8.0
ASKED = (
    "plain",
    "one_tensor",
    "many_tensors",
    "large",
    "empty_tensor",
    "transposed",
    "frozen",
    "unused",
    "unused_once",
    "unused_on_one",
    "backwards",
    "buckets",
    "tied",
    "mixed",
    "float64",
    "two_optimizers",
)


def _tensor(raw: bytes, s: Scenario, i: int) -> Tensor:
    dtype = s.dtype_of(i)
    return (
        torch.frombuffer(bytearray(raw), dtype=dtype).view(s.shapes[i])
        if raw
        else torch.empty(s.shapes[i], dtype=dtype)
    )


def wrapper_averages(subject: Subject, world_size: int, name: str) -> list[Violation]:
    """Rank 0's parameters everywhere at the start; at each step the mean gradient, on every rank, for every trainable tensor."""
    s = BY_NAME[name].drawn(subject.draw(name))
    limit_s = STOPS_AFTER_S if name in MAY_STOP else None
    results = subject.evidence(
        ("ddp", name, world_size), lambda: subject.ask(ddp_body, world_size, s.to_dict(), deadline_s=limit_s)
    )
    if "not_judged" in results[0]:
        raise NotJudged(results[0]["not_judged"])
    return _start(s, results) + _gradients(s, world_size, results) + _ends(results)


def _start(s: Scenario, results: list[dict[str, Any]]) -> list[Violation]:
    for rank, r in enumerate(results):
        for i, shape in enumerate(s.shapes):
            seen, wanted = _tensor(r["start"][i], s, i), initial_value(s.seed, i, shape).to(s.dtype_of(i))
            if not torch.equal(seen, wanted):
                hint = "the source itself was changed" if rank == 0 else "construction must copy rank 0's parameters"
                return [
                    Violation(
                        "the parameter after construction",
                        "its own",
                        "rank 0's",
                        "broadcast",
                        step=0,
                        rank=rank,
                        tensor=f"p{i}",
                        hint=hint,
                    )
                ]
    return []


def _gradients(s: Scenario, world_size: int, results: list[dict[str, Any]]) -> list[Violation]:
    for step in range(1, s.steps + 1):
        for rank, r in enumerate(results):
            for i in range(len(s.shapes)):
                found = _wrong_gradient(s, world_size, step, rank, i, r["gradients"][step - 1][i])
                if found:
                    return [found]
    return []


def _wrong_gradient(s: Scenario, world_size: int, step: int, rank: int, i: int, raw: bytes | None) -> Violation | None:
    if i in s.frozen:
        return None
    wanted = mean_gradient(s, step, world_size, i)
    if wanted is None:  # nobody used it: no gradient, or zeros
        wanted = torch.zeros(s.shapes[i], dtype=torch.float64)
        raw = raw if raw is not None else bytes(wanted.numel() * s.dtype_of(i).itemsize)
    if raw is None:
        return Violation(
            "the gradient", "absent", "the mean over ranks", "reduce", step=step, rank=rank, tensor=f"p{i}"
        )
    seen = _tensor(raw, s, i).double().flatten()
    relative = GRAD_REL if s.dtype_of(i) == torch.float32 else GRAD_REL_FLOAT64
    off = (seen - wanted.flatten()).abs() > relative * wanted.flatten().abs()
    off |= ~torch.isfinite(seen)
    if not bool(off.any()):
        return None
    at = int(off.nonzero()[0])
    hint = explain_gradient(s, world_size, step, rank, i, seen)
    return Violation(
        "the gradient",
        f"{float(seen[at]):.9g}",
        f"{float(wanted.flatten()[at]):.9g}, the mean over ranks",
        "reduce",
        step=step,
        rank=rank,
        tensor=f"p{i}",
        element=at,
        hint=hint,
    )


def _ends(results: list[dict[str, Any]]) -> list[Violation]:
    for rank, r in enumerate(results):
        for i, (mine, first) in enumerate(zip(r["end"], results[0]["end"], strict=True)):
            if mine != first:
                return [
                    Violation(
                        "the parameter after the steps",
                        "its own",
                        "rank 0's, byte for byte",
                        "reduce",
                        rank=rank,
                        tensor=f"p{i}",
                    )
                ]
    return []


def _check(name: str) -> Check:
    named = {"two_optimizers": ("two_wrappers", "two wrappers in one process share nothing")}
    own_name, claim = named.get(name, (name, BY_NAME[name].why))
    return Check(
        f"ddp.{own_name}",
        claim,
        lambda subject, N: wrapper_averages(subject, N, name),
        ("ddp",),
        "reduce",
        world_sizes=(2, 3, 4),
        exotic=name in EXOTIC,
        may_stop=name in MAY_STOP,
    )


def _built(subject: Subject, world_size: int) -> list[dict[str, Any]]:
    """What every rank showed of a wrapper that was just built."""
    results: list[dict[str, Any]] = subject.evidence(
        ("ddp built", world_size), lambda: subject.ask(construction_body, world_size)
    )
    if "not_judged" in results[0]:
        raise NotJudged(results[0]["not_judged"])
    return results


def wrapper_passes_through(subject: Subject, world_size: int) -> list[Violation]:
    """The wrapper's forward takes what the module's takes, by position and by name, and returns what it returns."""
    for rank, r in enumerate(_built(subject, world_size)):
        if r["forward"] != r["right"]:
            seen = r["forward"] if isinstance(r["forward"], str) else "another value"
            hint = "forward(*args, **kwargs) must hand all of them on, and return the module's result"
            wanted = "the module's own result"
            return [Violation("wrapper(x, scale=2.0)", seen, wanted, "forward", step=0, rank=rank, hint=hint)]
    return []


def wrapper_copies_buffers(subject: Subject, world_size: int) -> list[Violation]:
    """Construction gives every rank rank 0's buffers, as it does its parameters."""
    results = _built(subject, world_size)
    for rank, r in enumerate(results):
        for name, value in r["buffers"].items():
            if value != results[0]["buffers"][name]:
                seen, wanted = value[:16], f"{results[0]['buffers'][name][:16]}, rank 0's"
                return [
                    Violation(
                        "the buffer's bytes after construction (sha256)",
                        seen,
                        wanted,
                        "broadcast",
                        step=0,
                        rank=rank,
                        tensor=name,
                    )
                ]
    return []


for _name in ASKED:
    register(_check(_name))
register(Check("ddp.forward", "forward hands on all arguments", wrapper_passes_through, ("ddp",), "forward", (2,)))
register(Check("ddp.buffers", "construction copies buffers too", wrapper_copies_buffers, ("ddp",), "broadcast", (2, 3)))
