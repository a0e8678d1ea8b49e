"""A checkpoint comes back as it was saved, is refused if it is not that, and outlives a save that fails."""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.mark.checks("checkpoint")
def test_checkpoint_is_whole_or_refused(check: Callable[[], bool]) -> None:
    assert check()
