"""Wrong command lines, and the parsers of single options that tell them.

Owns exit codes, `UsageError` and the one-line messages for values that are no numbers. Leaves ranges and
combinations to `config` and to the commands.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import NoReturn

EXIT_OK, EXIT_VIOLATED, EXIT_USAGE, EXIT_BROKEN = 0, 1, 2, 3


class UsageError(Exception):
    """A command that cannot be carried out as asked. The message is one line: what is X, but should be Y.

    No ValueError, which argparse would replace by words of its own.
    """

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


class Parser(argparse.ArgumentParser):
    """An argument parser that raises UsageError instead of printing its usage and leaving."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (`{self.prog} --help` lists the options)")


def whole(what: str) -> Callable[[str], int]:
    """A parser of one whole number."""

    def parse(text: str) -> int:
        try:
            return int(text)
        except ValueError:
            raise UsageError(f"{what} is {text!r}, but should be a whole number") from None

    return parse


def number(what: str) -> Callable[[str], float]:
    """A parser of one number."""

    def parse(text: str) -> float:
        try:
            return float(text)
        except ValueError:
            raise UsageError(f"{what} is {text!r}, but should be a number") from None

    return parse


def pair(what: str) -> Callable[[str], tuple[float, float]]:
    """A parser of two numbers with a comma between them."""

    def parse(text: str) -> tuple[float, float]:
        try:
            first, second = (float(part) for part in text.split(","))
        except ValueError:
            raise UsageError(f"{what} is {text!r}, but should be two numbers with a comma between them") from None
        return first, second

    return parse


def sizes(what: str) -> Callable[[str], tuple[int, ...]]:
    """A parser of whole numbers from 1, separated by commas."""

    def parse(text: str) -> tuple[int, ...]:
        try:
            found = tuple(int(part) for part in text.split(","))
        except ValueError:
            found = (0,)
        if min(found) < 1:
            raise UsageError(f"{what} is {text!r}, but should be whole numbers from 1, separated by commas")
        return found

    return parse


def names(text: str) -> tuple[str, ...]:
    """Words separated by commas."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def one_of(what: str, value: str, choices: tuple[str, ...]) -> str:
    """`value`, if it is among `choices`; else UsageError."""
    if value not in choices:
        raise UsageError(f"{what} is {value!r}, but should be one of {', '.join(choices)}")
    return value


def seconds(what: str, value: float) -> float:
    """`value`, if a run can be given so many seconds; else UsageError."""
    if not 0 < value < math.inf:
        raise UsageError(f"{what} is {value!r}, but should be a positive, finite number of seconds")
    return value
