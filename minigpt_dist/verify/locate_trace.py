"""The first difference between two traces, which hold digests in place of tensors.

Owns the order in which a record is compared. For two runs with their tensors, `locate.py` says more: element, values, cause.
"""

from __future__ import annotations

from collections.abc import Mapping

from minigpt_dist.trace import Record, Trace
from minigpt_dist.verify.difference import Difference
from minigpt_dist.verify.locate_state import in_order, kind_of_state

DIGEST = 16  # characters of a sha256 that are shown


def locate_in_traces(observed: Trace, expected: Trace) -> Difference | None:
    """The first record, in the order of steps and of what a step does, in which `observed` is not `expected`; None if none is.

    Seconds and bytes held are not compared: they may differ where every bit of the run is the same.
    """
    for step in sorted({*observed.steps, *expected.steps}):
        ours, theirs = observed.at(step), expected.at(step)
        if [r.rank for r in ours] != [r.rank for r in theirs]:
            a, b = f"{len(ours)} ranks", f"{len(theirs)} ranks"
            return Difference(
                step, 0, "launch", "the record", 0, a, b, cause="not every rank came to this step in both"
            )
        for part in (_read, _computed, _state):
            found = next((d for a, b in zip(ours, theirs, strict=True) if (d := part(a, b)) is not None), None)
            if found is not None:
                return found
    return None


def _read(ours: Record, theirs: Record) -> Difference | None:
    if ours.tokens == theirs.tokens:
        return None
    pairs = zip(ours.tokens, theirs.tokens, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ours.tokens), len(theirs.tokens)))
    a, b = str(ours.tokens[at : at + 1]), str(theirs.tokens[at : at + 1])
    return Difference(ours.step, ours.rank, "data", "tokens", at, a, b)


def _computed(ours: Record, theirs: Record) -> Difference | None:
    for name, stage in (("loss", "forward"), ("grad_norm", "backward")):
        a, b = repr(getattr(ours, name)), repr(getattr(theirs, name))
        if a != b:
            return Difference(ours.step, ours.rank, stage, name, 0, a, b)
    return None


def _state(ours: Record, theirs: Record) -> Difference | None:
    for path in in_order(list({**theirs.optimizer, **ours.optimizer})):
        stage = "reduce" if kind_of_state(path) == "first" else "optimizer"
        found = _digests(ours, stage if ours.step else "model", path, ours.optimizer, theirs.optimizer)
        if found is not None:
            return found
    for name in {**theirs.params, **ours.params}:
        found = _digests(ours, "gather" if ours.step else "model", name, ours.params, theirs.params)
        if found is not None:
            return found
    a, b = ([[c["op"], c["dtype"], c["numel"]] for c in r.collectives] for r in (ours, theirs))
    if a != b:
        at = next((i for i, (one, other) in enumerate(zip(a, b, strict=False)) if one != other), min(len(a), len(b)))
        return Difference(ours.step, ours.rank, "reduce", "collectives", at, str(a[at : at + 1]), str(b[at : at + 1]))
    return None


def _digests(
    at: Record, stage: str, name: str, ours: Mapping[str, str], theirs: Mapping[str, str]
) -> Difference | None:
    a, b = ours.get(name, "absent"), theirs.get(name, "absent")
    return None if a == b else Difference(at.step, at.rank, stage, name, 0, a[:DIGEST], b[:DIGEST])
