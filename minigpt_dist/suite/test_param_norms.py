"""(b) Every rank holds the same parameter norm, and the same bytes, at every step."""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.mark.checks("param_norms")
def test_every_rank_holds_the_same_parameters_at_every_step(check: Callable[[], bool]) -> None:
    assert check()
