"""What a server imports before it forks ranks, so that none of them has to.

Owns the order: libraries, then the ledger over them, then this package. Standard library only, until it is called.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import tempfile

__all__ = ["preload"]

_LIBRARIES = ("numpy", "safetensors.torch", "torch", "torch.distributed", "torch._dynamo")
_PACKAGE = ("minigpt_dist.worker",)


def preload(names: list[str]) -> None:
    """Import what ranks will need.  What cannot be imported is left to the rank that asks for it, and its traceback."""
    import torch

    torch.set_num_threads(1)
    cache = "TORCHINDUCTOR_CACHE_DIR"
    with tempfile.TemporaryDirectory(prefix="minigpt-dist-") as scratch:
        os.environ.setdefault(cache, scratch)  # torch._dynamo makes its cache's folder as it is imported
        _try_to_import(*_LIBRARIES, *(name for name in names if not name.startswith("minigpt_dist.")))
        if os.environ[cache] == scratch:
            del os.environ[cache]
    from minigpt_dist.launch import ledger, rank

    ledger.install()  # before anything can import a collective by name
    _try_to_import(*_PACKAGE, *(name for name in names if name.startswith("minigpt_dist.")))
    rank.ready()
    gc.collect()
    gc.freeze()  # a collection in a rank would write to, and so copy, every page of the objects made here


def _try_to_import(*names: str) -> None:
    for name in names:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
