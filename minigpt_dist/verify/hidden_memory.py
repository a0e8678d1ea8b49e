"""Memory that a census of tensors does not see: arrays of numpy, byte strings, and storages that are held without a tensor.

An optimizer may keep its state in any of them. Owns finding them and their bytes. Leaves tensors to `memory.py`.
"""

from __future__ import annotations

import array
import bisect
import sys
from collections.abc import Sequence
from gc import collect, get_objects, get_referents  # by name, as in `memory.py`
from types import ModuleType
from typing import Any

import torch
from torch import nn

from minigpt_dist.memory import live_tensors
from minigpt_dist.trace import own_part

LEAST = 1024  # smaller objects are an interpreter's daily life: keys, messages, step counts


def hidden_objects() -> list[Any]:
    """Every such object of at least LEAST bytes that something alive holds. Held by the list, so that none is taken for another later."""
    collect()
    numpy = sys.modules.get("numpy")
    arrays = () if numpy is None else (numpy.ndarray,)
    kinds = (*arrays, bytes, bytearray, array.array, torch.UntypedStorage)
    module_globals = [vars(m) for m in list(sys.modules.values()) if type(m) is ModuleType]
    held = get_referents(*get_objects(), *module_globals)
    found = {id(o): o for o in held if issubclass(type(o), kinds)}
    return [o for o in found.values() if _extent(o)[1] >= LEAST]


def hidden_bytes(known: Sequence[Any], module: nn.Module) -> int:
    """Bytes of the objects that are not in `known` (an earlier `hidden_objects()`) and share no memory with a tensor.

    Tensors are those alive, and what `module` holds: a gradient that was never asked for is held by C++ alone.
    """
    before = set(map(id, known))
    grads = [p.grad for p in module.parameters() if p.grad is not None]
    tensors = [*live_tensors(), *module.parameters(), *module.buffers(), *grads]
    storages = sorted({(s.data_ptr(), s.nbytes()) for s in (own_part(t).untyped_storage() for t in tensors)})
    extents = dict(_extent(o) for o in hidden_objects() if id(o) not in before)
    return sum(n for address, n in extents.items() if not _within(address, storages))


def _extent(held: Any) -> tuple[int, int]:
    """Address and bytes of what `held` keeps alive: of an array, of the array that it is a part of."""
    if isinstance(held, torch.UntypedStorage):
        return held.data_ptr(), held.nbytes()
    if hasattr(held, "__array_interface__"):
        while hasattr(held.base, "__array_interface__"):
            held = held.base
        return held.__array_interface__["data"][0], held.nbytes
    return id(held), sys.getsizeof(held)


def _within(address: int, storages: Sequence[tuple[int, int]]) -> bool:
    i = bisect.bisect_right(storages, (address, sys.maxsize)) - 1
    return i >= 0 and address < sum(storages[i])
