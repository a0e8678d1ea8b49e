"""Parsers of quantities with units: bytes, bytes a second, operations a second."""

from __future__ import annotations

import re
from collections.abc import Callable

from minigpt_dist.cli.usage import UsageError

UNITS = {"": 1, "B": 1, **{f"{p}B": 1000 ** (i + 1) for i, p in enumerate("KMGTP")}}
UNITS |= {f"{p}iB": 1024 ** (i + 1) for i, p in enumerate("KMGTP")}
_NUMBER = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z/]*)\s*", re.ASCII)


def size(what: str) -> Callable[[str], float]:
    """A parser of bytes: a number, and a decimal (80GB) or binary (80GiB) unit, or none."""
    return _parser(what, "", "a size such as 80GB or 80GiB")


def bandwidth(what: str) -> Callable[[str], float]:
    """A parser of bytes a second: as a size, with or without "/s"."""
    return _parser(what, "/s", "bytes a second, such as 25GB/s")


def per_second(what: str) -> Callable[[str], float]:
    """A parser of a plain number above 0."""

    def parse(text: str) -> float:
        found = _NUMBER.fullmatch(text)
        if found is None or found[2] or not float(found[1]) > 0:
            raise UsageError(f"{what} is {text!r}, but should be a number above 0, such as 312e12")
        return float(found[1])

    return parse


def _parser(what: str, suffix: str, expected: str) -> Callable[[str], float]:
    def parse(text: str) -> float:
        found = _NUMBER.fullmatch(text)
        unit = None if found is None else UNITS.get(found[2].removesuffix(suffix) if suffix else found[2])
        value = 0.0 if found is None or unit is None else float(found[1]) * unit
        if not 0 < value < 1e30:
            raise UsageError(f"{what} is {text!r}, but should be {expected}")
        return value

    return parse


def told(nbytes: float) -> str:
    """Bytes in the largest decimal unit that leaves a figure before the point."""
    for unit in ("PB", "TB", "GB", "MB", "KB"):
        if nbytes >= UNITS[unit]:
            return (
                f"{nbytes / UNITS[unit]:.3g} {unit}"
                if nbytes < 999.5 * UNITS[unit]
                else f"{nbytes / UNITS[unit]:.0f} {unit}"
            )
    return f"{nbytes:.0f} B"
