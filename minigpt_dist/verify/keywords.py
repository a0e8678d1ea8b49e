"""What a foreign callable takes by keyword, so that it is asked only for what it says it has.

Owns reading signatures, of functions and of classes that pass keywords on to their bases. Leaves what is asked to the probes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

_keywords: dict[int, tuple[Callable[..., Any], tuple[frozenset[str], bool]]] = {}


def keywords(function: Callable[..., Any]) -> tuple[frozenset[str], bool]:
    """(names that `function` takes, whether it also takes any other). A class that passes **kwargs on is read up its bases.

    Asked for thousands of times, so remembered: by identity, since what is foreign may not hash.
    """
    if id(function) not in _keywords:
        _keywords[id(function)] = function, _read_keywords(function)
    return _keywords[id(function)][1]


def _read_keywords(function: Callable[..., Any]) -> tuple[frozenset[str], bool]:
    names: set[str] = set()
    layers = (
        [c.__dict__["__init__"] for c in inspect.getmro(function) if "__init__" in c.__dict__]
        if inspect.isclass(function)
        else [function]
    )
    for layer in layers:
        try:
            parameters = inspect.signature(layer).parameters.values()
        except (TypeError, ValueError):
            break
        names.update(p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            return frozenset(names), False
    return frozenset(names), True


def accepts(function: Callable[..., Any], name: str) -> bool:
    """Does `function` take the keyword `name` by that name? (One that takes any keyword and names none is asked nothing extra.)"""
    names, anything = keywords(function)
    return name in names or (anything and names <= {"self", "cls", "module", "params", "args"})


def accepted(function: Callable[..., Any], options: dict[str, Any]) -> dict[str, Any]:
    """The part of `options` that `function` takes."""
    return {name: value for name, value in options.items() if accepts(function, name)}
