"""Bytes of a data-parallel wrapper's own buckets: gradients that it keeps beside those of the parameters, and no state of an optimizer.

Owns finding them: what hangs on the wrapper, but for its module and any optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

DEPTH = 6  # of lists in objects in dicts: a bucket's buffer lies at two to four


def bucket_bytes(wrapper: Any, module: nn.Module) -> int:
    """Bytes of distinct storages on a wrapper that are none of its module's; at most those of the module's parameters."""
    params = list(module.parameters())
    known = {
        t.untyped_storage().data_ptr()
        for t in [*params, *module.buffers(), *(p.grad for p in params if p.grad is not None)]
    }
    found: dict[int, int] = {}
    level = list(getattr(wrapper, "__dict__", {}).values())
    for _ in range(DEPTH):
        for value in level:
            if isinstance(value, Tensor) and (storage := value.untyped_storage()).data_ptr() not in known:
                found[storage.data_ptr()] = storage.nbytes()
        level = [part for value in level for part in _parts(value)]
    return min(sum(found.values()), sum(p.numel() * p.element_size() for p in params))


def _parts(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, (list, tuple, set)):
        return list(value)
    if isinstance(value, (Tensor, nn.Module, torch.optim.Optimizer, type)):
        return []
    return list(getattr(value, "__dict__", {}).values())
