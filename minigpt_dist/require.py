"""Refusals in the project's one message shape: WHAT is OBSERVED, but should be EXPECTED.

Owns the shape, for values that a user sets. Leaves which values are right to whoever asks.
"""

from __future__ import annotations


def require(condition: bool, what: str, observed: object, expected: str) -> None:
    """Raise ValueError in the project's one message shape unless `condition` holds."""
    if not condition:
        raise ValueError(f"{what} is {observed!r}, but should be {expected}")


def require_count(what: str, value: object, least: int = 1) -> None:
    """Raise ValueError unless `value` is an int (no bool) of at least `least`."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    require(whole and value >= least, what, value, f"a whole number of at least {least}")  # type: ignore[operator]  # whole implies int


def require_one_of(what: str, value: object, choices: tuple[object, ...]) -> None:
    """Raise ValueError unless `value` is one of `choices`."""
    require(value in choices, what, value, f"one of {', '.join(map(str, choices))}")
