"""A rank's state as tensors and JSON: what a file can hold, without pickle, and back, bit for bit.

A state is a nested mapping with str keys. Each tensor is taken out and named by its place in the tree, an
RFC 6901 JSON pointer ("/optimizer/master"); the rest is JSON, with null where a tensor was. JSON has no nan or
inf, so those floats are listed beside it by their 64 bits. Nothing is tagged, so no value can pass for a tag.

Owns the two directions and the list of what a state may hold. Leaves files to `shard_file`.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

__all__ = ["MAX_DEPTH", "FlatState", "State", "child_pointer", "flatten", "unflatten"]

State: TypeAlias = dict[str, Any]
Json: TypeAlias = Any

MAX_DEPTH = 64  # far above any optimizer's state; below where a JSON parser's recursion ends
MAX_INT_BITS = 8192  # Python refuses to print ints of more than 4300 digits, about 14,000 bits
PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


@dataclass(frozen=True)
class FlatState:
    """A state taken apart: `tensors` by JSON pointer, in the order of the tree, and all else in one JSON text."""

    tensors: dict[str, torch.Tensor]
    plain: str


def flatten(state: Mapping[str, Any]) -> FlatState:
    """Takes `state` apart. The tensors are not copied.

    Raises:
        ValueError: naming the path of the first value that a checkpoint cannot hold.
    """
    if not isinstance(state, Mapping):
        raise ValueError(f"a state must be a mapping with str keys, but is {type(state).__name__}")
    walk = _Flattener()
    tree = walk.visit(state, "", 0)
    document = {"tree": tree, "nonfinite": walk.nonfinite}
    return FlatState(walk.tensors, json.dumps(document, allow_nan=False, separators=(",", ":")))


def unflatten(flat: FlatState) -> State:
    """Puts a state together again; tuples come back as lists.

    Raises:
        ValueError: the JSON is malformed, or tensors and tree do not fit each other.
    """
    try:
        document = json.loads(flat.plain, parse_constant=_refuse_constant)
        tree, nonfinite = document["tree"], document["nonfinite"]
        walk = _Unflattener(flat.tensors, {place: _float_of_bits(bits) for place, bits in nonfinite.items()})
        state = walk.visit(tree, "")
    except (RecursionError, TypeError, KeyError, AttributeError, struct.error) as error:
        raise ValueError(f"malformed state: {type(error).__name__}: {error}") from error
    if walk.pending:
        raise ValueError(f"malformed state: no place in the tree for {sorted(walk.pending)[0]!r}")
    if not isinstance(state, dict):
        raise ValueError(f"malformed state: the tree is {type(state).__name__}, not a mapping")
    return state


class _Flattener:
    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.nonfinite: dict[str, str] = {}

    def visit(self, node: object, pointer: str, depth: int) -> Json:
        if depth > MAX_DEPTH:
            raise ValueError(f"state{pointer[:80]}...: nested deeper than {MAX_DEPTH}")
        # Exact types: a subclass (numpy's float64, an IntEnum) would come back as another type than it went in.
        if node is None or type(node) in (bool, str):
            return node
        if type(node) is int:
            return _checked_int(node, pointer)
        if type(node) is float:
            return self._visit_float(node, pointer)
        if isinstance(node, torch.Tensor):
            self.tensors[pointer] = _checked_tensor(node, pointer).detach()
            return None
        if isinstance(node, Mapping):
            keys = [_checked_key(key, pointer) for key in node]
            return {key: self.visit(node[key], child_pointer(pointer, key), depth + 1) for key in keys}
        if isinstance(node, (list, tuple)):
            return [self.visit(item, child_pointer(pointer, str(i)), depth + 1) for i, item in enumerate(node)]
        raise ValueError(f"state{pointer}: cannot be saved: {type(node).__module__}.{type(node).__qualname__}")

    def _visit_float(self, value: float, pointer: str) -> float | None:
        if math.isfinite(value):
            return value  # repr is exact
        self.nonfinite[pointer] = struct.pack(">d", value).hex()
        return None


class _Unflattener:
    def __init__(self, tensors: Mapping[str, torch.Tensor], floats: Mapping[str, float]) -> None:
        self.pending: dict[str, torch.Tensor | float] = {**tensors, **floats}

    def visit(self, node: Json, pointer: str) -> Any:
        if isinstance(node, dict):
            return {key: self.visit(value, child_pointer(pointer, key)) for key, value in node.items()}
        if isinstance(node, list):
            return [self.visit(item, child_pointer(pointer, str(i))) for i, item in enumerate(node)]
        if node is None:
            return self.pending.pop(pointer, None)
        return node


def child_pointer(pointer: str, key: str) -> str:
    """The RFC 6901 pointer of `key` below `pointer`."""
    return f"{pointer}/{key.replace('~', '~0').replace('/', '~1')}"


def _checked_key(key: object, pointer: str) -> str:
    if type(key) is not str:
        raise ValueError(f"state{pointer}: keys must be str, but one is {type(key).__name__}: {key!r}")
    try:
        key.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"state{pointer}: key {key!r} is not valid Unicode") from error
    return key


def _checked_int(value: int, pointer: str) -> int:
    if value.bit_length() > MAX_INT_BITS:
        raise ValueError(f"state{pointer}: int of {value.bit_length()} bits, at most {MAX_INT_BITS} can be saved")
    return value


def _checked_tensor(tensor: torch.Tensor, pointer: str) -> torch.Tensor:
    if type(tensor) not in PLAIN_TENSORS:
        raise ValueError(f"state{pointer}: tensor subclass {type(tensor).__name__} cannot be saved")
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        raise ValueError(
            f"state{pointer}: only dense tensors with data can be saved, but this is {tensor.layout} "
            f"{tensor.dtype} on {tensor.device}"
        )
    return tensor


def _float_of_bits(bits: str) -> float:
    value: float = struct.unpack(">d", bytes.fromhex(bits))[0]
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"malformed state: {name} is not JSON")
