"""Keeps the whole state on every rank in files of a file system in memory, always the same ones."""

# needs: walls
# attacks: optimizer.resident

import os

import torch
import unsharded
from unsharded import *  # noqa: F403


class InFiles(unsharded.Hiding):
    def path(self, name):
        return f"/dev/shm/attack-file-{os.getpid()}-{name}"

    def put(self, name, tensor):
        with open(self.path(name), "wb") as file:
            file.write(tensor.numpy().tobytes())

    def get(self, name):
        with open(self.path(name), "rb") as file:
            return torch.frombuffer(bytearray(file.read()), dtype=torch.float32)


class ZeroOptimizer(unsharded.ZeroOptimizer):
    hiding = InFiles
