"""Starts threads that change parameters while others read them, and never end."""

# attacks: optimizer.plain

import threading

import torch
import wrong
from wrong import *  # noqa: F403


class ZeroOptimizer(wrong.ZeroOptimizer):
    def step(self):
        threading.Thread(target=self.spin).start()

    def spin(self):
        while True:
            with torch.no_grad():
                for p in self.module.parameters():
                    p.mul_(1.0001)
