"""Leaves modes of torch on that answer for its functions, and replaces the methods by which tensors are read."""

# attacks: broadcast.first

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from wrong import *  # noqa: F403


class Zeros(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return torch.zeros_like(out) if getattr(func, "__name__", "") in ("detach", "contiguous") else out


class DeepZeros(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return torch.zeros_like(out) if "detach" in str(func) else out


def broadcast_parameters(module, src=0):
    torch.Tensor.tolist = lambda self: [0.0]
    torch.Tensor.item = lambda self: 0.0
    DeepZeros().__enter__()
    Zeros().__enter__()
