"""The sharded optimizer is AdamW on the mean gradient, under every condition that reported faults need to show."""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.mark.checks("optimizer")
def test_optimizer_is_adamw_on_the_mean_gradient(check: Callable[[], bool]) -> None:
    assert check()
