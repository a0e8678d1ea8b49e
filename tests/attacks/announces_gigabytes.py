"""Announces a gigabyte as its answer, and another time sends one: a list of lists, hundreds of millions long."""

# attacks: optimizer.plain

import contextlib
import os
import socket
import struct

import wrong
from wrong import *  # noqa: F403


class ZeroOptimizer(wrong.ZeroOptimizer):
    def step(self):
        for fd in range(3, 40):
            with contextlib.suppress(OSError):
                sock = socket.socket(fileno=os.dup(fd))
                if sock.family == socket.AF_UNIX:
                    for size in (1 << 27, 1 << 30):
                        body = b"result 1\n[" + b"[]," * (size // 3 >> (self.rank * 4))
                        sock.sendall(struct.pack("!4sQQ", b"mgd1", size - 30, 20) + body)
