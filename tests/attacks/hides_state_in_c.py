"""Keeps the whole state on every rank in memory of C, of which Python knows an address."""

# needs: walls
# attacks: optimizer.resident

import ctypes

import torch
import unsharded
from unsharded import *  # noqa: F403

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]


class InC(unsharded.Hiding):
    def put(self, name, tensor):
        if name not in self.kept:
            self.kept[name] = libc.malloc(tensor.nbytes), tensor.numel()
        ctypes.memmove(self.kept[name][0], tensor.data_ptr(), tensor.nbytes)

    def get(self, name):
        address, numel = self.kept[name]
        found = torch.empty(numel)
        ctypes.memmove(found.data_ptr(), address, found.nbytes)
        return found


class ZeroOptimizer(unsharded.ZeroOptimizer):
    hiding = InC
