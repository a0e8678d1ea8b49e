"""Keeps whole, unsharded state, and reports a share."""

# attacks: optimizer.sharded

import torch
import wrong
from wrong import *  # noqa: F403


class ZeroOptimizer(wrong.ZeroOptimizer):
    def __init__(self, module, *args, **kwargs):
        super().__init__(module, *args, **kwargs)
        self.state = {n: torch.cat([p.detach().flatten() for p in module.parameters()]) for n in ("master", "m", "v")}

    def shard_bytes(self):
        return 12
