"""Makes every parameter a tensor that says it equals everything."""

# attacks: optimizer.plain

import torch
import wrong
from wrong import *  # noqa: F403


class Agreeable(torch.nn.Parameter):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in (torch.equal, torch.allclose, torch.Tensor.__eq__):
            return True
        return super().__torch_function__(func, types, args, kwargs or {})


class ZeroOptimizer(wrong.ZeroOptimizer):
    def __init__(self, module, *args, **kwargs):
        super().__init__(module, *args, **kwargs)
        for p in module.parameters():
            p.__class__ = Agreeable
