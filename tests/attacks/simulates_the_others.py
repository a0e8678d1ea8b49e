"""Each rank works out what the others would have sent, and no rank sends anything."""

# attacks: optimizer.traffic
# needs: walls

import sys

import torch
import wrong
from wrong import *  # noqa: F403


class ZeroOptimizer(wrong.ZeroOptimizer):
    def __init__(self, module, world_size, rank, **options):
        super().__init__(module, world_size, rank)
        self.inner = torch.optim.AdamW(module.parameters(), weight_decay=0.0, lr=options["lr"])
        self.steps = 0

    def step(self):
        self.steps += 1
        frame = sys._getframe()
        while "s" not in frame.f_locals and not hasattr(frame.f_locals.get("self"), "s"):
            frame = frame.f_back
        scenario = frame.f_locals["self"].s
        gradient = sys.modules["minigpt_dist.verify.gradients"].rank_gradient
        for i, (p, shape) in enumerate(zip(self.module.parameters(), scenario.shapes, strict=False)):
            parts = [gradient(scenario.seed, i, shape, self.steps, r) for r in range(self.world_size)]
            p.grad = (sum(parts) / self.world_size).to(p.dtype)
        self.inner.step()
