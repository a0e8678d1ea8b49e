"""Makes every parameter NaN, which is further than no bound from nothing."""

# attacks: optimizer.plain

import torch
import wrong
from wrong import *  # noqa: F403


class ZeroOptimizer(wrong.ZeroOptimizer):
    def step(self):
        with torch.no_grad():
            for p in self.module.parameters():
                p.fill_(float("nan"))
