"""Keeps the whole state on every rank in integers of a million digits, in text and in buffers of streams."""

# needs: walls
# attacks: optimizer.resident

import io

import torch
import unsharded
from unsharded import *  # noqa: F403


class InNumbers(unsharded.Hiding):
    def put(self, name, tensor):
        raw = b"\1" + tensor.numpy().tobytes()
        self.kept[name] = {
            "w": io.BytesIO,
            "m": lambda r: r.decode("latin-1"),
            "v": lambda r: int.from_bytes(r, "big"),
        }[name](raw)

    def get(self, name):
        kept = self.kept[name]
        if name == "v":
            raw = kept.to_bytes(-(-kept.bit_length() // 8), "big")
        else:
            raw = kept.getvalue() if name == "w" else kept.encode("latin-1")
        return torch.frombuffer(bytearray(raw[1:]), dtype=torch.float32)


class ZeroOptimizer(unsharded.ZeroOptimizer):
    hiding = InNumbers
