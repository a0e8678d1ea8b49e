"""Is the sharded optimizer AdamW on the mean gradient, under every condition of `scenario.py`?

Owns the comparison of a trajectory with the oracle's, and the naming of the first difference.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from minigpt_dist.memory import zero1_bytes
from minigpt_dist.verify.adam_oracle import TORCH, readings, returned_loss, trajectory
from minigpt_dist.verify.checks.registry import Check, register
from minigpt_dist.verify.extra_bytes import hint_of
from minigpt_dist.verify.linear_probe import probe_body
from minigpt_dist.verify.mistakes import explain
from minigpt_dist.verify.scenario import BY_NAME, SCENARIOS, Scenario
from minigpt_dist.verify.subject import NotJudged, Subject
from minigpt_dist.verify.violation import Violation

# Largest deviation of a correct float32 trajectory from the float64 oracle: 5.5e-7, over all scenarios at N = 1, 2, 3, 4, 8 (parameters
# of order one; the gradients are exact to add, so only Adam's own rounding is left). The smallest fault of the catalogue moves 6e-5.
PARAM_ABS = 4e-6
# The same in float64 for implementations that keep a float64 master: 2.7e-16.
PARAM_ABS_FLOAT64 = 1e-13

# Conditions that an implementation may refuse aloud.
EXOTIC = frozenset({"transposed", "empty_tensor", "float64", "late_group", "closure", "closure_tiny", "mixed"})

Values = list[list[Tensor]]


def observed_values(s: Scenario, raw: dict[str, Any]) -> Values:
    """[step][tensor] from the bytes a rank returned."""
    dtypes = [s.dtype_of(i) for i in range(len(s.shapes))]
    return [
        [
            torch.frombuffer(bytearray(b), dtype=dtype).view(shape) if b else torch.empty(shape, dtype=dtype)
            for b, shape, dtype in zip(row, s.shapes, dtypes, strict=True)
        ]
        for row in raw["values"]
    ]


def trajectories(subject: Subject, world_size: int, s: Scenario) -> tuple[list[dict[str, Any]], list[Values]]:
    """Raw results and parameters of every rank under one scenario, run once for all checks."""
    raw = subject.evidence(("linear", s, world_size), lambda: subject.ask(probe_body, world_size, s.to_dict()))
    if "not_judged" in raw[0]:
        raise NotJudged(raw[0]["not_judged"])
    return raw, [observed_values(s, r) for r in raw]


def first_difference(seen: list[Values], right: Values, bound: float) -> tuple[int, int, int, int] | None:
    """(step, rank, tensor, element) of the first parameter further than `bound` from the oracle; NaN is always further."""
    for step in range(len(right)):
        for rank, values in enumerate(seen):
            for i, wanted in enumerate(right[step]):
                off = (values[step][i].double() - wanted.double()).abs().flatten()
                if off.numel() and not bool((off <= bound).all()):
                    return step, rank, i, int(torch.nan_to_num(off, nan=torch.inf).argmax())
    return None


def optimizer_matches(subject: Subject, world_size: int, s: Scenario) -> list[Violation]:
    """Every rank's parameters equal AdamW's on the mean gradient, at every step; ours bit for bit."""
    s = s.drawn(subject.draw(s.name))
    raw, seen = trajectories(subject, world_size, s)
    keeps_dtype = subject.ours or raw[0]["averages_outside"]  # an optimizer of torch's shape has no float32 master copy
    bound = PARAM_ABS_FLOAT64 if keeps_dtype and s.dtype == "float64" else PARAM_ABS
    found: tuple[int, int, int, int] | None = None
    right: Values = []
    for reading in [TORCH] if subject.ours else readings(s):
        candidate = trajectory(s, world_size, reading)
        difference = first_difference(seen, candidate, bound)
        if difference is None:
            return _dtypes(s, raw) + _bits(subject, s, world_size, seen) + _returned(s, world_size, raw, candidate)
        if found is None or difference[0] > found[0]:
            found, right = difference, candidate
    assert found is not None
    step, rank, i, element = found
    stage, hint = explain(s, world_size, seen, step)
    return [
        Violation(
            f"parameter p{i} of scenario '{s.name}' ({s.why})",
            f"{float(seen[rank][step][i].flatten()[element]):.9g}",
            f"{float(right[step][i].flatten()[element]):.9g} (AdamW on the mean gradient, within {bound:g})",
            stage,
            step=step,
            rank=rank,
            tensor=f"p{i}",
            element=element,
            hint=hint,
        )
    ]


def _dtypes(s: Scenario, raw: list[dict[str, Any]]) -> list[Violation]:
    """Parameters keep their type: one that was swapped for a float32 copy would fit within the bounds."""
    if s.mixed:  # one flat buffer, of one dtype, is a layout that many take
        return []
    for rank, r in enumerate(raw):
        for i, seen in enumerate(r["dtypes"]):
            wanted = str(s.dtype_of(i)).removeprefix("torch.")
            if seen != wanted:
                hint = "write new values into the parameter: p.copy_(...)"
                return [
                    Violation(
                        "the dtype of a parameter after the steps",
                        seen,
                        wanted,
                        "gather",
                        rank=rank,
                        tensor=f"p{i}",
                        hint=hint,
                    )
                ]
    return []


def _bits(subject: Subject, s: Scenario, world_size: int, seen: list[Values]) -> list[Violation]:
    """Our own stack promises more: the bits of torch.optim.AdamW fed the same mean. (A clipped gradient is rounded once more.)"""
    if not subject.ours or s.max_norm == 1.0 or s.mixed:
        return []
    right = trajectory(s, world_size, dtype=getattr(torch, s.dtype))
    found = first_difference(seen, right, 0.0)
    if found is None:
        return []
    step, rank, i, element = found
    return [
        Violation(
            f"the bits of p{i} in scenario '{s.name}'",
            float(seen[rank][step][i].flatten()[element]).hex(),
            float(right[step][i].flatten()[element]).hex(),
            "optimizer",
            step=step,
            rank=rank,
            tensor=f"p{i}",
            element=element,
        )
    ]


def _returned(s: Scenario, world_size: int, raw: list[dict[str, Any]], right: Values) -> list[Violation]:
    """step(closure) returns the closure's loss."""
    if not s.closure:
        return []
    for rank, r in enumerate(raw):
        if r["evaluations"] != s.steps:
            return [
                Violation(
                    "evaluations of the closure",
                    f"{r['evaluations']} in {s.steps} steps",
                    f"{s.steps}, one a step",
                    "optimizer",
                    rank=rank,
                )
            ]
        for step, value in enumerate(r["returned"], start=1):
            wanted = returned_loss(s, right, step, rank)
            if value is None or abs(value - wanted) > 1e-4 * abs(wanted):
                return [
                    Violation(
                        "what step(closure) returned", f"{value}", f"{wanted:.6g}", "optimizer", step=step, rank=rank
                    )
                ]
    return []


def optimizer_state_is_sharded(subject: Subject, world_size: int) -> list[Violation]:
    """Bytes alive besides parameters and gradients after the steps: 12*ceil(P/N) on every rank of ours; no more in all for others."""
    s = BY_NAME["memory"].drawn(subject.draw("memory"))
    raw, _ = trajectories(subject, world_size, s)
    P, _largest = _sizes(s)
    share = zero1_bytes(P, world_size)
    held = [r["bytes"]["optimizer"] for r in raw]
    if subject.ours:
        return [_memory(s, rank, h, share) for rank, h in enumerate(held) if h != share][:1]
    # Together at most one copy of the state, plus padding and step counts: 3 % and 4 KiB a rank.
    most = sum(allowed(share) for _ in held)
    if sum(held) > most:
        worst = max(range(world_size), key=lambda r: held[r])
        return [_memory(s, worst, held[worst], share, hint_of(held, P, share))]
    if sum(held) < 8 * P:
        return [
            Violation(
                "optimizer memory over all ranks",
                f"{sum(held)} bytes",
                f"at least {8 * P} (two float32 moments of {P} elements)",
                "memory",
                step=s.steps,
            )
        ]
    return []


def optimizer_state_is_balanced(subject: Subject, world_size: int) -> list[Violation]:
    """No rank holds more than its share, or than its share and one whole parameter where parameters are not cut."""
    s = BY_NAME["memory"].drawn(subject.draw("memory"))
    raw, _ = trajectories(subject, world_size, s)
    P, largest = _sizes(s)
    whole = largest * (8 if raw[0]["averages_outside"] else 12)  # parameters may have owners instead of being cut
    share = (8 if raw[0]["averages_outside"] else 12) * -(-P // world_size)
    held = [r["bytes"]["optimizer"] for r in raw]
    for rank, mine in enumerate(held):
        if mine > allowed(share) + whole:
            hint = "state is lopsided: some ranks own more than others"
            if sum(held) > sum(allowed(share) for _ in held):
                hint = hint_of(held, P, share)
            return [_memory(s, rank, mine, share + whole, hint)]
    return []


def reduction_reaches_its_minimum(subject: Subject, world_size: int) -> list[Violation]:
    """What crosses the network is at least what any reduction and gathering must move: 2(N-1) times 4P bytes a step."""
    s = BY_NAME["memory"].drawn(subject.draw("traffic"))
    subject.ask(probe_body, world_size, replace(s, steps=1).to_dict())  # ranks are there and have met
    before = subject.traffic(world_size)
    raw = subject.ask(probe_body, world_size, s.to_dict())
    after = subject.traffic(world_size)
    if "not_judged" in raw[0]:
        raise NotJudged(raw[0]["not_judged"])
    if before is None or after is None:
        raise NotJudged("traffic is read from outside, of a sandbox with a network of its own")
    least = 2 * (world_size - 1) * 4 * _sizes(s)[0] * s.steps
    if after - before >= least:
        return []
    hint = "no rank can know the mean of gradients that it never received"
    return [
        Violation(
            "bytes between the ranks", f"{after - before}", f"at least {least}", "reduce", step=s.steps, hint=hint
        )
    ]


def allowed(share: int) -> int:
    """What another implementation may hold for a share: 3 % of padding, and 4 KiB of step counts and the like, more."""
    return share + share * 3 // 100 + 4096


def _sizes(s: Scenario) -> tuple[int, int]:
    """(P, elements of the largest parameter)."""
    numels = [torch.Size(shape).numel() for shape in s.shapes]
    return sum(numels), max(numels)


def _memory(s: Scenario, rank: int, held: int, wanted: int, hint: str = "") -> Violation:
    return Violation(
        "optimizer memory", f"{held} bytes", f"{wanted} bytes", "memory", step=s.steps, rank=rank, hint=hint
    )


def _scenario_check(s: Scenario) -> Check:
    def find(subject: Subject, world_size: int) -> list[Violation]:
        return optimizer_matches(subject, world_size, s)

    return Check(
        f"optimizer.{s.name}",
        s.why,
        find,
        ("optimizer",),
        "optimizer",
        world_sizes=(2,) if s.name == "huge" else (1, 2, 3, 4),
        exotic=s.name in EXOTIC,
    )


for _scenario in SCENARIOS:
    register(_scenario_check(_scenario))
for _name, _claim, _find in (
    ("sharded", "ranks together hold the optimizer's state once", optimizer_state_is_sharded),
    ("balanced", "no rank holds more than its share of the state", optimizer_state_is_balanced),
):
    register(Check(f"optimizer.{_name}", _claim, _find, ("optimizer",), "memory", world_sizes=(1, 2, 3, 4)))
register(
    Check(
        "optimizer.traffic",
        "gradients and parameters cross the network",
        reduction_reaches_its_minimum,
        ("optimizer",),
        "reduce",
        world_sizes=(2, 3),
    )
)
