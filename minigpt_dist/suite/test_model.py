"""MiniGPT is a causal decoder of the stated size."""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.mark.checks("model")
def test_model_is_a_causal_decoder(check: Callable[[], bool]) -> None:
    assert check()
