"""The plugin's rules: which long tests run, and when."""

from __future__ import annotations

import pytest

from minigpt_dist.pytest_on_request import asked_for


@pytest.mark.parametrize(
    "expression, runs",
    {
        "": False,
        "catalogue": False,
        "peers": True,
        "slow": True,
        "peers or slow": True,
        "slow and not checks": True,
    }.items(),
)
def test_a_long_test_runs_when_any_of_its_markers_is_named(expression: str, runs: bool) -> None:
    assert asked_for({"slow", "peers", "parametrize"}, expression) is runs


def test_a_test_without_such_a_marker_always_runs() -> None:
    assert asked_for({"parametrize"}, "")
