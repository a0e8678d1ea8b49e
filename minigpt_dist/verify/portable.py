"""A foreign optimizer's state in a form that our own checkpoint holds: only str keys, no tuples.

Owns the two directions. torch.optim's own state has int keys and tuples of betas; where a submission brings an optimizer and no checkpoint,
ours must carry its state as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PAIRS, TUPLE = "\0pairs", "\0tuple"  # no name that an optimizer gives to a part of its state


def pack(value: Any) -> Any:
    """`value` with every mapping of other keys than str as a list of pairs, and every tuple as a list, both marked."""
    if isinstance(value, Mapping):
        if all(type(key) is str for key in value):
            return {key: pack(inner) for key, inner in value.items()}
        return {PAIRS: [[pack(key), pack(inner)] for key, inner in value.items()]}
    if type(value) is tuple:
        return {TUPLE: [pack(inner) for inner in value]}
    return [pack(inner) for inner in value] if type(value) is list else value


def unpack(value: Any) -> Any:
    """The inverse of `pack`."""
    if isinstance(value, dict):
        if value.keys() == {PAIRS}:
            return {unpack(key): unpack(inner) for key, inner in value[PAIRS]}
        if value.keys() == {TUPLE}:
            return tuple(unpack(inner) for inner in value[TUPLE])
        return {key: unpack(inner) for key, inner in value.items()}
    return [unpack(inner) for inner in value] if type(value) is list else value
