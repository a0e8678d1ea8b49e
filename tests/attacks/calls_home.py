"""Fetches the answer from the network."""

# needs: walls
# attacks: optimizer.plain

import socket

import wrong
from wrong import *  # noqa: F403


class ZeroOptimizer(wrong.ZeroOptimizer):
    def step(self):
        with socket.create_connection(("192.0.2.1", 80), timeout=2) as home:
            home.sendall(b"GET /answer")
