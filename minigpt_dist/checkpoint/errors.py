"""The one error a checkpoint raises, and its one shape: file, what was expected, what was found.

Owns `CheckpointError`. Wrong arguments stay `ValueError`; this is for what the disk or another rank did.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["CheckpointError", "mismatch", "naming_file", "need_count"]


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or must not be trusted. The message is one line."""


def mismatch(file: Path | str, expected: object, found: object) -> CheckpointError:
    """The error `FILE: expected EXPECTED, found FOUND`, on one line whatever its parts contain."""
    line = f"{file}: expected {expected}, found {found}"
    return CheckpointError(" ".join(line.split()))


@contextmanager
def naming_file(file: Path | str, expected: str) -> Iterator[None]:
    """Turns an `OSError` inside the block into a `CheckpointError` that names `file` and the cause.

    The file the system names wins over `file`: it is the closer one.
    """
    try:
        yield
    except OSError as error:
        cause = f"{type(error).__name__}: {error.strerror or error}"
        # For a call on a descriptor, the name is missing or a number.
        raise mismatch(error.filename if isinstance(error.filename, str) else file, expected, cause) from error


def need_count(name: str, value: object) -> None:
    """ValueError naming the argument unless `value` is an int of at least 1."""
    if type(value) is not int or value < 1:
        raise ValueError(f"{name} is {value!r}, but should be an int of at least 1")
