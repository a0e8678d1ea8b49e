"""Keeps the whole state on every rank, passed over by a garbage collector that was told to, and by what asks the collector."""

# attacks: optimizer.sharded

import gc

import unsharded
from unsharded import *  # noqa: F403

objects, hidden = gc.get_objects, set()
gc.get_objects = lambda *args, **options: [o for o in objects(*args, **options) if id(o) not in hidden]


class Frozen(unsharded.Hiding):
    def put(self, name, tensor):
        super().put(name, tensor)
        hidden.add(id(self.kept[name]))
        gc.freeze()


class ZeroOptimizer(unsharded.ZeroOptimizer):
    hiding = Frozen
