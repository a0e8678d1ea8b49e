"""Parameters in flight: bytes that collectives have gathered on this rank and that are not freed yet.

Owns telling gathered memory from all other: what a gather or broadcast wrote, and every copy of that, until its storage is gone. Seen
from below Python, at the dispatcher, so that what only autograd holds counts as well.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# Collectives that give a rank what others hold; what they write comes first among their arguments.
GATHERS = ("allgather", "all_gather", "broadcast", "scatter_", "alltoall", "recv")
# Operations that only move numbers: what they make of gathered memory is gathered memory.
MOVES = (
    "cat",
    "stack",
    "clone",
    "copy_",
    "_to_copy",
    "constant_pad_nd",
    "split_copy",
    "_foreach_copy_",
    "index_select",
)


class InFlight(TorchDispatchMode):
    """`most`: the most gathered bytes that were alive at once inside the block, which may be entered again.

    A collective's own thread may hold its memory for a moment after the end: of several equal blocks, the least is what the code holds.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.most = 0
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def restart(self) -> None:
        """Begin anew from what is alive now."""
        self.most = self._held()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = op(*args, **(kwargs or {}))
        space, _, name = str(op.name()).partition("::")
        name = name.partition(".")[0]
        if "c10d" in space and "reduce" not in name and any(word in name for word in GATHERS):
            self._note(_tensors(args[0]) if name.endswith("_") else _tensors(out))
        elif name in MOVES and any(t.untyped_storage()._cdata in self._alive for t in _tensors((args, kwargs))):
            self._note(_tensors(args[0]) if name.endswith("copy_") else _tensors(out))
        return out

    def _note(self, tensors: list[Tensor]) -> None:
        for storage in (t.untyped_storage() for t in tensors):
            key = storage._cdata
            if key not in self._alive:
                self._alive[key] = weakref.ref(storage)
                weakref.finalize(storage, self._alive.pop, key, None)
        self.most = max(self.most, self._held())

    def _held(self) -> int:
        return sum(s.nbytes() for ref in list(self._alive.values()) if (s := ref()) is not None)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]
