"""What a parent hands to its ranks: anything pickle takes, tensors as their bytes.

Owns the way down, from a parent that is trusted with any size. Leaves the way up, from ranks that are not, to `wire`.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch

__all__ = ["pack", "unpack"]


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        """A plain tensor is its bytes: torch's own way makes an archive for each, ten times as slow for small ones."""
        plain = type(value) is torch.Tensor and value.layout is torch.strided and value.device.type == "cpu"
        if not plain or value.requires_grad or not value.is_contiguous() or value.is_conj() or value.is_neg():
            return NotImplemented
        return _tensor, (value.dtype, tuple(value.shape), value.reshape(-1).view(torch.uint8).numpy().tobytes())


def _tensor(dtype: torch.dtype, shape: tuple[int, ...], data: bytes) -> torch.Tensor:
    """The inverse, in memory of its own."""
    flat = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    return flat.view(dtype).reshape(shape)


def pack(args: tuple[Any, ...]) -> bytes:
    """Raises ValueError for what cannot be sent."""
    buffer = io.BytesIO()
    try:
        _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(args)
    except Exception as error:  # pickle raises whatever the objects' own methods do
        raise ValueError(f"args cannot be sent to the ranks: {type(error).__name__}: {error}") from error
    return buffer.getvalue()


def unpack(data: bytes | bytearray) -> tuple[Any, ...]:
    """The arguments that `pack` was given."""
    args: tuple[Any, ...] = pickle.loads(data)
    return args
