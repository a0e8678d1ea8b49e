"""Bytes that come and go within a step: what autograd keeps, and the most that is alive at once.

Owns the observing, from outside the code that is observed. Leaves what is held between steps to `minigpt_dist/memory.py`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


def kept_for_backward(forward: Callable[[], Tensor], known: Iterable[Tensor]) -> int:
    """Bytes of the distinct storages that `forward` saves for backward, those behind `known` left out."""
    left_out = {t.untyped_storage().data_ptr() for t in known}
    saved: dict[int, int] = {}
    alive = []

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in left_out:
            saved[storage.data_ptr()] = storage.nbytes()
            alive.append(t)  # so that no later storage takes its address
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = forward()
    del out
    return sum(saved.values())


class Peak(TorchDispatchMode):
    """The most bytes alive at once, of storages that were made inside the block."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._live: dict[int, int] = {}

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = op(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in _tensors((args, kwargs))}
        for t in _tensors(out):
            storage = t.untyped_storage()
            key = storage._cdata
            if storage.nbytes() and key not in self._live and storage.data_ptr() not in given:
                self._live[key] = storage.nbytes()
                weakref.finalize(storage, self._live.pop, key, None)
        self.most = max(self.most, sum(self._live.values()))
        return out


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]
