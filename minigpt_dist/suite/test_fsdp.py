"""A fully sharded wrapper trains as one process does, and holds a rank's share."""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.mark.checks("fsdp")
def test_wrapper_cuts_parameters_and_trains_as_one_process(check: Callable[[], bool]) -> None:
    assert check()
