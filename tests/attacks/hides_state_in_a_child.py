"""Keeps the whole state on every rank in a process of its own."""

# needs: walls
# attacks: optimizer.resident

import os
from multiprocessing.connection import Pipe

import torch
import unsharded
from unsharded import *  # noqa: F403


class InAChild(unsharded.Hiding):
    def __init__(self):
        self.ours, theirs = Pipe()
        if os.fork() == 0:
            self.ours.close()
            kept = {}
            try:
                while True:
                    name = theirs.recv_bytes()
                    if name.startswith(b"put"):
                        kept[name[3:]] = theirs.recv_bytes()
                    theirs.send_bytes(kept[name[3:]] if name.startswith(b"get") else b"")
            finally:
                os._exit(0)
        theirs.close()

    def ask(self, *messages):
        for message in messages:
            self.ours.send_bytes(message)
        return self.ours.recv_bytes()

    def put(self, name, tensor):
        self.ask(b"put" + name.encode(), tensor.numpy().tobytes())

    def get(self, name):
        return torch.frombuffer(bytearray(self.ask(b"get" + name.encode())), dtype=torch.float32)


class ZeroOptimizer(unsharded.ZeroOptimizer):
    hiding = InAChild
