"""One call gives every rank the source's parameters and buffers."""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.mark.checks("broadcast")
def test_every_tensor_reaches_every_rank_bit_for_bit(check: Callable[[], bool]) -> None:
    assert check()
