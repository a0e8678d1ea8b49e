"""The run equals one process on the whole batch, and no token, rank or collective is left out."""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.mark.checks("oracle", "tokens_once", "same_collectives")
def test_distributed_run_equals_one_process(check: Callable[[], bool]) -> None:
    assert check()
