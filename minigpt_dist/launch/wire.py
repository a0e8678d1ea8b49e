"""Plain data and tensors as bytes, without pickle: what a rank may hand to its parent.

Owns the encoding: a JSON header, with everything that JSON cannot say in a one-key object, and raw blobs beside it in
order of appearance.  A rank runs code that nobody vouches for, so decoding executes nothing and checks everything.
Leaves the transport to `frames`.

    None, bool, str, list, finite float, int of 64 bits   as in JSON
    {"int": "0x.."}  {"float": "nan"}                      what JSON cannot say exactly
    {"tuple": [..]}  {"dict": {..}}                        containers
    {"bytes": n}     {"tensor": [dtype, shape, n]}         the next n bytes of the body
"""

from __future__ import annotations

import json
import math
from typing import Any

import torch

from minigpt_dist.launch.errors import WireError

__all__ = ["MAX_BYTES", "MAX_FOREIGN_BYTES", "MAX_FOREIGN_HEADER", "decode", "encode"]

MAX_BYTES = 1 << 30  # header and body of one message
# The same from a sandbox, and of the header alone: the largest of a right submission are 30 MB and 1 MB.
MAX_FOREIGN_BYTES, MAX_FOREIGN_HEADER = 1 << 28, 1 << 24
_MAX_DEPTH = 64  # far from the recursion limit, for what is sent and for what is received
_INT64 = 1 << 63
_PLAIN = "plain data: None, bool, int, float, str, bytes, list, tuple, dict or tensor"

_DTYPE_NAMES = (
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
)
_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _DTYPE_NAMES if hasattr(torch, name)}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def encode(value: object, limit: int | None = None) -> tuple[bytes, list[bytes | memoryview]]:
    """Turn plain data into a header and blobs.

    Plain data is None, bool, int, float, str, bytes, and lists, tuples and dicts (with str keys) of plain data;
    tensors travel as their bytes, whatever their device, strides or grad.  `limit` caps the total in bytes (default
    `MAX_BYTES`).
    Raises WireError that names the path inside the value, as in `result[1]['loss']`.
    """
    encoder = _Encoder(MAX_BYTES if limit is None else limit)
    header = json.dumps(encoder.node(value, "result", 0), separators=(",", ":"), allow_nan=False).encode("ascii")
    encoder.count(len(header), "result")
    return header, encoder.blobs


def decode(header: bytes, body: bytes | bytearray) -> Any:
    """Rebuild what `encode` was given: tuples as tuples, tensors on the CPU, bit for bit.

    Raises WireError for anything `encode` cannot have written.
    """
    try:
        tree = json.loads(header, object_pairs_hook=_unique, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise WireError(f"the header is no well-formed JSON: {error}") from None
    decoder = _Decoder(memoryview(body))
    value = decoder.node(tree, 0)
    if decoder.offset != len(body):
        raise WireError(f"the header accounts for {decoder.offset} bytes, the body holds {len(body)}")
    return value


class _Encoder:
    def __init__(self, limit: int) -> None:
        self.limit, self.size = limit, 0
        self.blobs: list[bytes | memoryview] = []

    def count(self, size: int, path: str) -> None:
        self.size += size
        if self.size > self.limit:
            raise WireError(f"{path} brings the result to {self.size} bytes, the limit is {self.limit}")

    def node(self, value: object, path: str, depth: int) -> object:
        if depth > _MAX_DEPTH:
            raise WireError(f"{path} is nested deeper than {_MAX_DEPTH} levels")
        kind = type(value)  # exact types: a subclass would silently come back as its base
        if value is None or kind is bool or kind is str:
            return value
        if isinstance(value, int) and kind is int:
            return value if -_INT64 <= value < _INT64 else {"int": hex(value)}
        if isinstance(value, float) and kind is float:
            return value if math.isfinite(value) else {"float": repr(value)}
        if isinstance(value, bytes) and kind is bytes:
            return {"bytes": self._blob(value, path)}
        if isinstance(value, torch.Tensor):
            return {"tensor": self._tensor(value, path)}
        return self._container(value, path, depth + 1)

    def _container(self, value: object, path: str, depth: int) -> object:
        kind = type(value)
        if isinstance(value, list) and kind is list:
            return [self.node(item, f"{path}[{i}]", depth) for i, item in enumerate(value)]
        if isinstance(value, tuple) and kind in (tuple, torch.Size):
            return {"tuple": [self.node(item, f"{path}[{i}]", depth) for i, item in enumerate(value)]}
        if isinstance(value, dict) and kind is dict:
            for key in value:
                if type(key) is not str:
                    raise WireError(f"{path} has the key {key!r} of type {_name(type(key))}, expected str keys")
            return {"dict": {key: self.node(item, f"{path}[{key!r}]", depth) for key, item in value.items()}}
        raise WireError(f"{path} is {_name(kind)}, expected {_PLAIN}")

    def _blob(self, data: bytes | memoryview, path: str) -> int:
        self.count(len(data), path)
        self.blobs.append(data)
        return len(data)

    def _tensor(self, tensor: torch.Tensor, path: str) -> list[object]:
        if tensor.layout is not torch.strided or tensor.is_meta or tensor.dtype not in _NAMES:
            raise WireError(
                f"{path} is a {tensor.layout} tensor of {tensor.dtype} on {tensor.device}, expected dense data"
            )
        # Checked on the numbers, before an expanded view is made into the memory it stands for.
        if self.size + tensor.numel() * tensor.element_size() > self.limit:
            self.count(tensor.numel() * tensor.element_size(), path)
        flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)  # (numel,)
        data = flat.view(torch.uint8).numpy().data if flat.numel() else b""
        return [_NAMES[tensor.dtype], list(tensor.shape), self._blob(data, path)]


class _Decoder:
    def __init__(self, body: memoryview) -> None:
        self.body, self.offset = body, 0

    def node(self, tree: object, depth: int) -> Any:
        if depth > _MAX_DEPTH:
            raise WireError(f"the header is nested deeper than {_MAX_DEPTH} levels")
        if isinstance(tree, float) and not math.isfinite(tree):
            raise WireError("the header holds a number outside the range of a float")
        if tree is None or isinstance(tree, (bool, int, float, str)):
            return tree
        if isinstance(tree, list):
            return [self.node(item, depth + 1) for item in tree]
        if not isinstance(tree, dict) or len(tree) != 1:
            raise WireError("the header holds an object that is no one-key tag")
        [(tag, content)] = tree.items()
        return self._tagged(tag, content, depth)

    def _tagged(self, tag: str, content: Any, depth: int) -> Any:
        if tag == "tuple" and isinstance(content, list):
            return tuple(self.node(item, depth + 1) for item in content)
        if tag == "dict" and isinstance(content, dict):
            return {key: self.node(item, depth + 1) for key, item in content.items()}
        if tag == "float" and content in ("nan", "inf", "-inf"):
            return float(content)
        if tag == "bytes":
            return bytes(self._take(content))
        if tag == "tensor" and isinstance(content, list) and len(content) == 3:
            return self._tensor(*content)
        if tag == "int" and isinstance(content, str):
            try:
                return int(content, 16)
            except ValueError:
                pass
        raise WireError(f"the header holds an unknown or malformed tag {tag!r}")

    def _take(self, size: object) -> memoryview:
        if type(size) is not int or not 0 <= size <= len(self.body) - self.offset:
            raise WireError(f"the header asks for {size!r} bytes, {len(self.body) - self.offset} are left")
        start, self.offset = self.offset, self.offset + size
        return self.body[start : self.offset]

    def _tensor(self, name: object, shape: object, size: object) -> torch.Tensor:
        dtype = _DTYPES.get(name) if isinstance(name, str) else None
        if dtype is None or not isinstance(shape, list) or not all(type(n) is int and 0 <= n < _INT64 for n in shape):
            raise WireError(f"the header describes a tensor of dtype {name!r} and shape {shape!r}")
        data = self._take(size)
        if math.prod(shape) * dtype.itemsize != len(data):
            raise WireError(f"a tensor of {name} and shape {shape} cannot be {len(data)} bytes")
        try:
            if not data:
                return torch.empty(shape, dtype=dtype)
            return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).reshape(shape)
        except (RuntimeError, ValueError) as error:  # dimensions whose product overflows beside a zero
            raise WireError(f"a tensor of {name} cannot have shape {shape}: {error}") from None


def _name(kind: type) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    tree = dict(pairs)
    if len(tree) != len(pairs):
        raise ValueError("a key occurs twice")
    return tree


def _refuse(constant: str) -> object:
    raise ValueError(f"{constant} is not JSON")
