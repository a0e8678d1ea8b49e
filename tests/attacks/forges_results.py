"""Writes answers of its own into every descriptor that it was given, in the wire's own format."""

# attacks: optimizer.plain

import contextlib
import json
import os
import struct

from wrong import *  # noqa: F403

for job in range(1, 6):
    answer = json.dumps({"dict": {"values": [], "returned": [], "bytes": {"dict": {}}}}).encode()
    header = b"result %d\n" % job + answer
    for fd in range(3, 64):
        with contextlib.suppress(OSError):
            os.write(fd, struct.pack("!4sQQ", b"mgd1", len(header), 0) + header)
