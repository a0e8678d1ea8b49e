"""(c) Optimizer memory a rank is 12P/N bytes: fp32 master, first and second moment."""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.mark.checks("optimizer_bytes", "live_bytes")
def test_optimizer_memory_is_shared_out_and_does_not_grow(check: Callable[[], bool]) -> None:
    assert check()
