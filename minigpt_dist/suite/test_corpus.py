"""The corpus is a function of its seed."""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.mark.checks("corpus")
def test_corpus_is_deterministic(check: Callable[[], bool]) -> None:
    assert check()
