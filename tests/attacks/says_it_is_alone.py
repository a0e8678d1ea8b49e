"""Tells torch and the judge's own code that there is one rank, so that what it does alone is right."""

# attacks: optimizer.plain

import sys

import torch
import torch.distributed as dist
import wrong
from wrong import *  # noqa: F403

dist.get_world_size, dist.get_rank = lambda *args: 1, lambda *args: 0
for name, module in list(sys.modules.items()):
    if name.startswith("minigpt_dist") and hasattr(module, "world"):
        module.world = lambda *args: (1, 0)


class ZeroOptimizer(wrong.ZeroOptimizer):
    def __init__(self, module, world_size, rank, **options):
        super().__init__(module, world_size, rank)
        self.inner = torch.optim.AdamW(module.parameters(), weight_decay=0.0, lr=options["lr"])

    def step(self):
        self.inner.step()
