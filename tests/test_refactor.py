"""What `minigpt-dist diff` asks without running anything: which cases, which revision next, which difference is the first."""

from __future__ import annotations

from typing import Any

import pytest

from minigpt_dist.trace import Record, Trace
from minigpt_dist.verify.locate_trace import locate_in_traces
from minigpt_dist.verify.refactor import Outcome, cases, first_bad

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("culprit", range(7))
def test_halving_finds_every_place_in_few_questions(culprit: int) -> None:
    commits, asked = "abcdefg", []

    def is_bad(commit: str) -> bool:
        asked.append(commit)
        return commit >= commits[culprit]

    assert first_bad(commits, is_bad) == commits[culprit]
    assert len(asked) <= 3


def test_traces_are_compared_in_the_order_of_a_step() -> None:
    def trace(**second: Any) -> Trace:
        same: dict[str, Any] = {
            "loss": 1.0,
            "grad_norm": 2.0,
            "tokens": [1, 2],
            "optimizer": {"master": "m", "exp_avg": "a"},
            "params": {"w": "p"},
        }
        return Trace({}, [Record(1, 0, **same), Record(1, 1, **{**same, **second})])

    def found(**second: Any) -> tuple[object, ...]:
        first = locate_in_traces(trace(**second), trace())
        assert first is not None
        return first.step, first.rank, first.stage, first.tensor, first.element

    assert locate_in_traces(trace(), trace(seconds={"optimizer": 3.0})) is None
    assert found(tokens=[1, 3], loss=1.5) == (1, 1, "data", "tokens", 1)
    assert found(loss=1.5, params={"w": "q"}) == (1, 1, "forward", "loss", 0)
    assert found(optimizer={"master": "n", "exp_avg": "b"}) == (1, 1, "reduce", "exp_avg", 0)
    assert found(optimizer={"master": "n", "exp_avg": "a"}, params={"w": "q"}) == (1, 1, "optimizer", "master", 0)
    assert found(params={"w": "q"}) == (1, 1, "gather", "w", 0)


def test_cases_cover_types_shards_micro_batches_reductions_and_dropout() -> None:
    found = cases((1, 4)).values()
    assert {(c.world_size, c.dtype, c.reduction, c.micro_batches, bool(c.model.dropout)) for c in found} == {
        (N, *rest)
        for N in (1, 4)
        for rest in (
            ("float32", "sum", 1, False),
            ("float64", "sum", 2, False),
            ("float32", "exact", 2, False),
            ("float32", "sum", 1, True),
        )
    }


def test_what_was_not_compared_is_not_identical() -> None:
    assert not Outcome("a", skipped="no dropout").identical
