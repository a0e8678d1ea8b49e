"""The first difference of a run from what it should be: step, rank, stage, tensor, element, values, a guess at the cause.

Owns `locate`, over two things to hold a run against: another run, bit for bit, or what one process works out step by step
from the run's own parameters and gradients (`locate_oracle.py`), within that oracle's bounds. Leaves running to
`locate_run.py` and the blame for a wrong update to `locate_blame.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from minigpt_dist.verify.capture import KINDS, Shot
from minigpt_dist.verify.difference import Difference, bits_differ, difference, differs
from minigpt_dist.verify.locate_cause import shape_of
from minigpt_dist.verify.locate_checkpoint import after_resume, after_save
from minigpt_dist.verify.locate_oracle import UNIT, Names
from minigpt_dist.verify.locate_run import Recomputed, Run
from minigpt_dist.verify.locate_state import in_order, kind_of_state
from minigpt_dist.verify.locate_step import Steps

# Logits and gradients of the same code at the same parameters in two processes: measured 0.0 apart over all correct runs.
# The bound leaves room for a wrapper that adds in another order: rounding units of the largest value in the tensor.
FORWARD_UNITS = 256
STAGE_OF = {
    "corpus": "data",
    "inputs": "data",
    "targets": "data",
    "logits": "forward",
    "loss": "forward",
    "grads": "backward",
    "held": "backward",
    "asked": "save",
    "saved": "save",
    "kept": "save",
    "loaded": "load",
    "resumed": "load",
}


def locate(observed: Run, expected: Run | Recomputed) -> Difference | None:
    """The first difference of `observed` in the order in which a run makes things, or None.

    Held against another Run every bit counts; held against Recomputed, what a correct implementation may do within rounding does not.
    ValueError if the two runs are of different configurations, or the oracle cannot judge this dtype.
    """
    if isinstance(expected, Recomputed):
        return by_oracle(observed, expected)
    if observed.config != expected.config:
        raise ValueError(
            f"the observed run's configuration is {observed.config}, but should be {expected.config}, the expected run's"
        )
    return by_bits(observed, expected)


def by_bits(observed: Run, expected: Run) -> Difference | None:
    """The first tensor of which a bit differs, over the run and then over its resume."""
    for ours, theirs in ((observed.shots, expected.shots), (observed.resumed, expected.resumed)):
        for step in sorted({step for step, _ in {**ours, **theirs}}):
            shots = [(ours.get((step, rank)), theirs.get((step, rank))) for rank in observed.ranks]
            found = _first_of_step(observed, expected, shots, step, resumed=ours is observed.resumed)
            if found is not None:
                return found
    return None


def _first_of_step(
    observed: Run, expected: Run, shots: list[tuple[Shot | None, Shot | None]], step: int, resumed: bool
) -> Difference | None:
    for kind in KINDS:
        for rank, (ours, theirs) in enumerate(shots):
            if ours is None or theirs is None:
                if ours is theirs:
                    continue
                there, absent = ("expected", "observed") if ours is None else ("observed", "expected")
                return Difference(
                    step,
                    rank,
                    "launch",
                    "the shot",
                    0,
                    cause=f"only the {there} run came to this step, not the {absent} one",
                )
            found = _first_of_kind(kind, ours, theirs)
            if found is not None:
                return (
                    found
                    if kind not in ("state", "params") or resumed
                    else _blamed(observed, expected, found, kind, shots)
                )
    return None


def _first_of_kind(kind: str, ours: Shot, theirs: Shot) -> Difference | None:
    seen, wanted = ours.get(kind), theirs.get(kind)
    names = list(dict.fromkeys([*wanted, *seen]))
    for name in in_order(names) if kind == "state" else names:
        stage = STAGE_OF.get(kind) or ("reduce" if kind_of_state(name) == "first" else "optimizer")
        if name not in seen or name not in wanted:
            there, absent = ("expected", "observed") if name not in seen else ("observed", "expected")
            return Difference(
                ours.step,
                ours.rank,
                stage,
                name,
                0,
                cause=f"there is a {kind} tensor of this name in the {there} run, none in the {absent}",
            )
        wrong = bits_differ(seen[name], wanted[name])
        if wrong is None or bool(wrong.any()):
            found = difference(ours.step, ours.rank, stage, name, seen[name], wanted[name], wrong)
            return found.because(found.cause or _shape(kind, ours, theirs, seen[name], wanted[name]))
    return None


def _shape(kind: str, ours: Shot, theirs: Shot, seen: Tensor, wanted: Tensor) -> str:
    """The shape of a difference between two runs, looked at over all parameters where it is one of them."""
    if not seen.is_floating_point():
        return ""
    unit, a, b, owner = (
        UNIT.get(str(seen.dtype).removeprefix("torch."), 2.0**-8),
        seen.double().flatten(),
        wanted.double().flatten(),
        None,
    )
    if bool(((a - b).abs() <= 64 * unit * b.abs().max()).all()):
        return "in the last bits only: additions in another order, or the same formula written otherwise"
    if kind in ("grads", "held", "params") and ours.get(kind).keys() == theirs.get(kind).keys():
        names = Names(theirs.get(kind))
        a, b = names.flatten(ours.get(kind)), names.flatten(theirs.get(kind))
    owner = torch.zeros(len(a), dtype=torch.long)
    return shape_of(a, b, a != b, None, owner, alone=True)


def _blamed(
    observed: Run, expected: Run, found: Difference, kind: str, shots: list[tuple[Shot | None, Shot | None]]
) -> Difference:
    """A difference after step(), with the stage that the oracle blames in the run that is wrong, if one is."""
    if found.step == 0:
        replicas = [ours.get("params") for ours, _ in shots if ours is not None]
        agree = all(
            not differs(a, b) for one in replicas for a, b in zip(one.values(), replicas[0].values(), strict=True)
        )
        return found.at_stage("model" if agree else "broadcast")
    if observed.config.dtype in UNIT:
        for run, whose in ((observed, ""), (expected, "in the expected run: ")):
            blamed = next((d for step, d in Steps(run).wrong_updates(until=found.step) if step == found.step), None)
            if blamed is not None:
                return found.at_stage(blamed.stage).because(whose + (blamed.cause or found.cause))
    if kind == "params":
        has_state = any(ours is not None and any(kind_of_state(n) for n in ours.get("state")) for ours, _ in shots)
        return found.at_stage("gather" if has_state else "optimizer")
    return found


def by_oracle(run: Run, oracle: Recomputed) -> Difference | None:
    """The first thing beyond the oracle's bounds; then what a checkpoint changed."""
    return next(_all_by_oracle(run, oracle), None)


def _all_by_oracle(run: Run, oracle: Recomputed) -> Iterator[Difference]:
    yield from _start(run, oracle)
    updates = dict(Steps(run, oracle.dtype).wrong_updates(until=run.steps[-1]))
    for step in run.steps[1:]:
        for kind in ("inputs", "targets", "logits", "loss", "grads"):
            for rank in run.ranks:
                yield from _against(run, oracle, kind, step, rank)
        if step in updates:
            yield updates[step]
        for rank in run.ranks:
            yield from after_save(run.shots[step, rank])
    yield from after_resume(run)


def _start(run: Run, oracle: Recomputed) -> Iterator[Difference]:
    """Step 0: every rank holds what rank 0 was seeded with."""
    for rank in run.ranks:
        for name, seen in run.shots[0, rank].get("params").items():
            wanted = oracle.initial.get(name)
            if wanted is not None and differs(seen, wanted):
                own = "" if rank == 0 or differs(seen, run.shots[0, 0].get("params")[name]) else " of every rank"
                yield difference(0, rank, "broadcast", name, seen, wanted).because(
                    f"the value{own} is not the one that rank 0 started with"
                )


def _against(run: Run, oracle: Recomputed, kind: str, step: int, rank: int) -> Iterator[Difference]:
    """One kind of tensor of one rank at one step against what one process gives."""
    seen, wanted = run.shots[step, rank].get(kind), oracle.parts[step, rank].get(kind, {})
    scale = (
        run.config.micro_batches if kind == "grads" and run.config.reduction == "exact" else 1
    )  # there the loss is not divided
    for name, right in wanted.items():
        if name not in seen:
            yield Difference(step, rank, STAGE_OF[kind], name, 0, cause=f"there is no {kind} tensor of this name")
            continue
        value = seen[name]
        if not value.is_floating_point():
            wrong = bits_differ(value, right)
        elif value.numel() != right.numel():
            wrong = None
        else:
            allowed = (
                FORWARD_UNITS * UNIT[run.config.dtype] * right.double().abs().max()
                if right.numel()
                else torch.tensor(0.0)
            )
            wrong = ~((value.double() / scale - right.double().view_as(value)).abs() <= allowed)
        if wrong is None or bool(wrong.any()):
            found = difference(step, rank, STAGE_OF[kind], name, value, (right * scale).to(value.dtype), wrong)
            yield found.because(found.cause or _stale(run, kind, step, rank, name, wrong))


def _stale(run: Run, kind: str, step: int, rank: int, name: str, wrong: Tensor | None) -> str:
    earlier = run.shots.get((step - 1, rank))
    now = run.shots[step, rank].get(kind)[name]
    if wrong is None or earlier is None or name not in earlier.get(kind):
        return ""
    before, owner = earlier.get(kind)[name], torch.zeros(now.numel(), dtype=torch.long)
    if before.shape != now.shape:
        return ""
    return shape_of(now.double().flatten(), now.double().flatten(), wrong.flatten(), before.double().flatten(), owner)
