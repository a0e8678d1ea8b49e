"""torch.compile, left out: a submission's code runs as it is written.

Compiling changes no result that is judged, but takes seconds on every rank of every run, a C++ compiler that a sandbox need not have,
and moves the last bits. Owns putting something in its place and knowing whether anyone called it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

NAME = "torch.compile"
SAID = "left out: the code runs as it is written"


def install() -> Callable[[], bool]:
    """Put a function in torch.compile's place that returns what it is given. Returns whether it has been called since."""
    called = False

    def as_written(model: Any = None, **options: Any) -> Any:
        nonlocal called
        called = True
        return model if model is not None else lambda function: function

    torch.compile = as_written
    return lambda: called
