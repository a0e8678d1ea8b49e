"""Does a fully sharded wrapper train as one process does: same start, mean gradient in every shard, no row or layer lost?"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from minigpt_dist.launch import LaunchError
from minigpt_dist.verify.checks.registry import Check, register
from minigpt_dist.verify.fsdp_probe import forward_body, scenario_body
from minigpt_dist.verify.sharded_oracle import states_of
from minigpt_dist.verify.sharded_scenario import BY_NAME, ONCE, SCENARIOS, ShardScenario
from minigpt_dist.verify.subject import NotJudged, Subject
from minigpt_dist.verify.violation import Violation

# Of the largest movement of a tensor, and of its largest element: correct runs in float32 are off by at most 2e-6 and 3e-7 of them.
MOVE_REL = 1e-3
VALUE_REL = 3e-6
# What a wrapper may refuse, in its own words: torch's first wrapper refuses frozen and trained parameters in one unit, some lessons ask
# for even sizes only. To fail at it is no refusal.
EXOTIC = frozenset({"uneven", "few_rows", "frozen"})
HINTS = {
    "uneven": "pad by rows or elements before the cut, and cut the padding off after the gather, not the last rows",
    "tied": "cut a shared parameter once, and give both layers the same one",
    "twice": "a second use adds to the gradient that is there: do not overwrite the shard's gradient",
    "accumulated": "add the reduced gradient to the shard's, do not overwrite it",
    "unused": "a layer without a gradient in a step has nothing to reduce",
}


def _drawn(subject: Subject, name: str) -> ShardScenario:
    number = subject.draw(f"fsdp {name}")
    return replace(BY_NAME[name], seed=1 + number % 10_000) if number else BY_NAME[name]


def _answers(subject: Subject, world_size: int, s: ShardScenario, rank_seeds: bool) -> list[dict[str, Any]]:
    key = ("fsdp", s.name, world_size, rank_seeds)
    results: list[dict[str, Any]] = subject.evidence(
        key, lambda: subject.ask(scenario_body, world_size, s.to_dict(), rank_seeds)
    )
    if "not_judged" in results[0]:
        raise NotJudged(results[0]["not_judged"])
    return results


def trains_as_one_process(subject: Subject, world_size: int, name: str) -> list[Violation]:
    """After every update, every parameter, gathered whole on every rank, is what one process has."""
    s = _drawn(subject, name)
    results = _answers(subject, world_size, s, rank_seeds=False)
    wanted = states_of(s, s.seed, world_size)
    for step, state in enumerate(wanted):
        for rank, r in enumerate(results):
            for tensor, value in state.items():
                seen = torch.frombuffer(bytearray(r["states"][step][tensor]), dtype=torch.float32).double()
                found = _wrong(s, world_size, step, rank, tensor, seen.view(value.shape), wanted)
                if found:
                    return [found]
    return []


def accumulates(subject: Subject, world_size: int) -> list[Violation]:
    """Two backwards add up, with the finish call after each, or else with one after both: an interface says neither."""
    failure: LaunchError | None = None
    found: list[Violation] = []
    try:
        found = trains_as_one_process(subject, world_size, "accumulated")
    except LaunchError as error:
        failure = error
    if failure is None and not found:
        return []
    with suppress(LaunchError):
        if not trains_as_one_process(subject, world_size, ONCE.name):
            return []
    if failure is not None:
        raise failure
    return found


def _wrong(
    s: ShardScenario, N: int, step: int, rank: int, tensor: str, seen: Tensor, states: list[dict[str, Tensor]]
) -> Violation | None:
    value, before = states[step][tensor], states[max(step - 1, 0)][tensor]
    moved = value - before
    off = (seen - value).abs()
    bad = off > MOVE_REL * moved.abs().max() + VALUE_REL * value.abs().max()
    bad |= ~torch.isfinite(seen)
    if not bool(bad.any()):
        return None
    at = int(bad.flatten().nonzero()[0])
    what = "the parameter after construction" if step == 0 else "the parameter after the update"
    return Violation(
        what,
        f"{float(seen.flatten()[at]):.9g}",
        f"{float(value.flatten()[at]):.9g}, as in one process",
        "gather" if step == 0 else "reduce",
        step=step,
        rank=rank,
        tensor=tensor,
        element=at,
        hint=_hint(s, N, seen - before, moved) if step else "",
    )


def _hint(s: ShardScenario, N: int, seen: Tensor, wanted: Tensor) -> str:
    """What the movement of a whole tensor looks like beside the one it should be."""
    if not bool(seen.abs().max() > 1e-7):
        return HINTS.get(
            s.name, "it did not move: does the optimizer hold the parameters that are there after the cut?"
        )
    used = wanted.abs() > 1e-2 * wanted.abs().max()
    ratio = seen[used] / wanted[used] if bool(used.any()) else torch.ones(1)
    for factor, why in (
        (N, "gradients are added up over ranks and not divided"),
        (1 / N, "divided by the world size twice"),
    ):
        if N > 1 and bool((ratio - factor).abs().max() < 0.05 * factor):
            return why
    return HINTS.get(
        s.name,
        "each rank's shard needs its own part of the mean over all ranks, parameters that are not cut the mean too",
    )


def starts_from_rank_0(subject: Subject, world_size: int) -> list[Violation]:
    """Modules that differ by rank are, once wrapped, rank 0's."""
    s = _drawn(subject, "update")
    wanted = states_of(s, s.seed, world_size)[0]
    for rank, r in enumerate(_answers(subject, world_size, s, rank_seeds=True)):
        for tensor, value in wanted.items():
            seen = torch.frombuffer(bytearray(r["states"][0][tensor]), dtype=torch.float32).view(value.shape)
            if not torch.equal(seen, value.float()):
                at = int((seen != value.float()).flatten().nonzero()[0])
                return [
                    Violation(
                        "the whole parameter after construction",
                        f"{float(seen.flatten()[at]):.9g}",
                        f"{float(value.flatten()[at]):.9g}, rank 0's",
                        "broadcast",
                        step=0,
                        rank=rank,
                        tensor=tensor,
                        element=at,
                        hint="broadcast rank 0's parameters before they are cut",
                    )
                ]
    return []


def passes_through(subject: Subject, world_size: int) -> list[Violation]:
    """The wrapper's forward takes what the module's takes, by position and by name, and returns what it returns."""
    results = subject.evidence(("fsdp forward", world_size), lambda: subject.ask(forward_body, world_size))
    if "not_judged" in results[0]:
        raise NotJudged(results[0]["not_judged"])
    for rank, r in enumerate(results):
        if r["seen"] != r["right"]:
            seen = r["seen"] if isinstance(r["seen"], str) else "another value"
            hint = "forward(*args, **kwargs) must hand all of them on, and return the module's result"
            wanted = "the module's own result"
            return [Violation("wrapper(x, scale=2.0)", seen, wanted, "forward", step=0, rank=rank, hint=hint)]
    return []


def _scenario_check(s: ShardScenario) -> Check:
    return Check(
        f"fsdp.{s.name}",
        s.why,
        accumulates if s.name == "accumulated" else lambda subject, N: trains_as_one_process(subject, N, s.name),
        ("fsdp",),
        "reduce",
        world_sizes=(1, 2, 3, 4) if s.name == "update" else (2, 3, 4),
        exotic=s.name in EXOTIC,
        in_words=True,
    )


# Hooks on outputs may be written for single tensors: then it refuses this module, which returns two.
register(
    Check("fsdp.forward", "forward hands on all arguments", passes_through, ("fsdp",), "forward", (2,), exotic=True)
)
register(Check("fsdp.start", "construction makes all ranks equal", starts_from_rank_0, ("fsdp",), "broadcast", (2, 3)))
for _s in SCENARIOS:
    register(_scenario_check(_s))
