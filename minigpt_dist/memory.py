"""Bytes really held: a census of the tensors alive in this process, by what they are for.

Owns counting (each storage once, whoever refers to it). Leaves the verdict on the counts to `verify/`.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Sequence

# By name: an implementation under judgement may have replaced what the module has.
from gc import collect, get_objects, get_referents
from types import FrameType, ModuleType

import torch
from torch import Tensor, UntypedStorage, nn

from minigpt_dist.trace import own_part


def _storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Address -> bytes of every distinct, non-empty storage behind `tensors`."""
    found: dict[int, int] = {}
    for t in tensors:
        storage = own_part(t).untyped_storage()
        if storage.nbytes():
            found[storage.data_ptr()] = storage.nbytes()
    return found


def held(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages behind `tensors` on this rank, each storage once."""
    return sum(_storages(tensors).values())


def live_tensors(counted: Collection[int] = ()) -> list[Tensor]:
    """Every tensor that some Python object holds now: an attribute, list, closure, module global, cache.

    counted: addresses of storages that the caller knows already; a tensor that only refers to these may be left out.
    Not counted: what only a running function's local variable holds (the batch, the loss), and what only C++ holds, such as
    the buffers of a collective whose communication thread has not let go yet.
    """
    collect()
    objects = [o for o in get_objects() if type(o) is not FrameType]
    # type(): isinstance would wake lazy proxies. A sparse tensor has no storage of its own.
    tensors = [o for o in objects if issubclass(type(o), Tensor) and o.layout == torch.strided]
    held = set(map(id, get_referents(*objects)))
    found = [t for t in tensors if id(t) in held]
    known = {*counted, *_storages(found)}
    open_ = [t for t in tensors if id(t) not in held and not known.issuperset(_storages([t]))]
    if not open_:
        return found
    # Objects frozen before a fork are not in get_objects: the globals of modules are looked at by hand. Only now, because to
    # look at all of them is to copy thousands of pages that a forked process shares.
    module_globals = [vars(m) for m in list(sys.modules.values()) if type(m) is ModuleType]
    held = set(map(id, get_referents(*module_globals)))
    return found + [t for t in open_ if id(t) in held]


def live_bytes() -> int:
    """Bytes of the storages behind every tensor of `live_tensors`, each storage once."""
    return held(live_tensors())


def census(module: nn.Module, known: Sequence[UntypedStorage] = ()) -> dict[str, int]:
    """Bytes by kind: params, grads, buffers, and `optimizer`: all else that is alive and not in `known`.

    Take `known = baseline()` before the optimizer is built, so that data and the caller's own tensors do not count.
    A storage shared by two kinds counts for the first of them. What only C++ holds (a DDP bucket) is not seen.
    """
    params = list(module.parameters())
    counts: dict[str, int] = {}
    before = {storage.data_ptr() for storage in known}
    counted: set[int] = set()
    for kind, tensors in (
        ("params", [p.data for p in params]),
        ("grads", [p.grad for p in params if p.grad is not None]),
        ("buffers", list(module.buffers())),
    ):
        found = _storages(tensors)
        counts[kind] = sum(size for address, size in found.items() if address not in counted)
        counted.update(found)
    rest = _storages(live_tensors(counted | before))
    counts["optimizer"] = sum(n for address, n in rest.items() if address not in counted and address not in before)
    return counts


def baseline() -> list[UntypedStorage]:
    """Storages alive now, to be left out of a later `census`. Held, so that no later storage can be given one's address."""
    storages = [own_part(t).untyped_storage() for t in live_tensors()]
    return [storage for storage in storages if storage.nbytes()]


def zero1_bytes(numel: int, world_size: int, bytes_per_element: int = 12) -> int:
    """Optimizer bytes a rank under ZeRO-1: 12*ceil(P/N) for fp32 master, first and second moment."""
    return bytes_per_element * -(-numel // world_size)


def state_bytes(stage: int, dtype: str, world_size: int) -> dict[str, float]:
    """Bytes of model states a parameter and rank, by kind, between backward and step, without padding.

    stage: 0 for data parallelism that cuts nothing, else ZeRO's. dtype: of parameters: "float32", or "bfloat16" beside a float32
    master copy. Rajbhandari et al. 2020, section 3.1 and figure 1, with Adam's K = 12, but for what is ours: from stage 1 on float32
    has a master copy too, until stage 3, in which it is all there is; gradients that are cut are summed in float32.
    """
    size, N = {"float32": 4, "bfloat16": 2}[dtype], world_size
    moments, master = 8, 4 if stage or dtype != "float32" else 0
    return {
        "params": size if stage < 3 else 0,
        "grads": size if stage < 2 else 4 / N,
        "optimizer": (master + moments) / (N if stage else 1),
    }
