"""(d) The step-10 checkpoint resumes byte-equal in fresh processes and trains on to the same bytes."""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.mark.checks("resume_bytes")
def test_resumed_run_equals_the_unbroken_run_byte_for_byte(check: Callable[[], bool]) -> None:
    assert check()
