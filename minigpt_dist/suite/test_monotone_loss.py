"""(a) The mean loss falls at every one of the 20 steps, within float noise."""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.mark.checks("monotone_loss")
def test_mean_loss_falls_at_every_step(check: Callable[[], bool]) -> None:
    assert check()
