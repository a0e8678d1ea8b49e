"""What ranks try in a sandbox, to see whether it holds: these bodies stand for foreign code.

Owns the attempts; each returns what it got. Leaves what should have happened to `selftest.py`. A part of every sandbox.
"""

from __future__ import annotations

import os
import signal
import socket

import torch
import torch.distributed as dist

__all__ = ["gather_body", "route_body", "secret_body", "swarm_body"]


def gather_body() -> float:
    """The sum of all ranks' numbers, by the process group."""
    total = torch.tensor(float(dist.get_rank() + 1))
    dist.all_reduce(total)
    return float(total)


def route_body() -> str:
    """Whether a packet could leave: "" or the address that it would go from."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(("192.0.2.1", 9))  # a documentation address (RFC 5737): asks for a route and sends nothing
        except OSError:
            return ""
        return str(sock.getsockname()[0])


def secret_body(path: str) -> str:
    """The content of a file that should not be there; "" if it cannot be read."""
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""


def swarm_body(most: int) -> int:
    """How many processes could be forked, of `most`."""
    made: list[int] = []
    try:
        for _ in range(most):
            pid = os.fork()
            if pid == 0:
                signal.pause()
                os._exit(0)
            made.append(pid)
    except OSError:
        pass
    for pid in made:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return len(made)
