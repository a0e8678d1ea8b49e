"""Single values of a rubric's TOML, read or refused in one line.

Owns types and ranges. Leaves what belongs together to `rubric`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

MAX_RANKS = 64


class RubricError(ValueError):
    """A rubric that cannot be used. The message is one line: what is X, but should be Y."""


def keys(where: str, table: dict[str, Any], known: Collection[str]) -> None:
    """No key of a table but the known ones. RubricError otherwise."""
    for key in table:
        if key not in known:
            raise RubricError(f"{where} has {key!r}, but should have only {', '.join(sorted(known))}")


def text(where: str, table: dict[str, Any], key: str, default: str | None = None) -> str:
    """A text; a missing one is an error where there is no default. RubricError otherwise."""
    value = table.get(key, default)
    if not isinstance(value, str) or (default is None and not value):
        raise RubricError(f"{key} of {where} is {value!r}, but should be a text")
    return value


def choice(where: str, table: dict[str, Any], key: str, choices: Sequence[str]) -> str:
    """One of a few words; the first where there is none. RubricError otherwise."""
    value = table.get(key, choices[0])
    if value not in choices:
        raise RubricError(f"{key} of {where} is {value!r}, but should be one of {', '.join(choices)}")
    return str(value)


def words(
    where: str, table: dict[str, Any], key: str, known: Sequence[str] | None, default: tuple[str, ...] | None
) -> tuple[str, ...]:
    """A list of texts, each once and each among `known`; may be absent only where there is a default."""
    value = table.get(key, None if default is None else list(default))
    if not isinstance(value, list) or not all(isinstance(v, str) for v in value) or (default is None and not value):
        raise RubricError(f"{key} of {where} is {value!r}, but should be a list of names")
    for name in value:
        if known is not None and name not in known:
            raise RubricError(f"{where} has {name!r} among its {key}, but should have only {', '.join(known)}")
        if value.count(name) > 1:
            raise RubricError(f"{where} has {name!r} twice among its {key}")
    return tuple(value)


def points(what: str, value: object) -> float:
    """A finite number of at least 0. RubricError otherwise."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise RubricError(f"{what} is {value!r}, but should be a finite number of at least 0")
    return float(value)


def sizes(where: str, value: object) -> tuple[int, ...]:
    """World sizes, rising. RubricError otherwise."""
    right = isinstance(value, list) and bool(value) and all(type(v) is int and 1 <= v <= MAX_RANKS for v in value)
    if not isinstance(value, list) or not right or value != sorted(set(value)):
        raise RubricError(
            f"world_sizes of {where} is {value!r}, but should be rising whole numbers from 1 to {MAX_RANKS}"
        )
    return tuple(value)
