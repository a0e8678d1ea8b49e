"""A data-parallel wrapper starts all ranks alike and leaves the mean gradient in p.grad."""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.mark.checks("ddp")
def test_wrapper_averages_gradients_over_ranks(check: Callable[[], bool]) -> None:
    assert check()
