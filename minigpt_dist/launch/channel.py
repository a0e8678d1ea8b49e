"""A line of JSON messages with descriptors beside them, between a parent and its rank server.

Owns the framing of that one conversation.  Leaves what is said to `server`, which answers, and `crew`, which asks.
"""

from __future__ import annotations

import json
import os
import socket
from collections import deque
from typing import Any

__all__ = ["Channel"]

_CHUNK = 1 << 16


class Channel:
    """One end of a connected Unix stream socket, which it owns."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._buffer = bytearray()
        self._fds: deque[int] = deque()

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self, message: dict[str, Any], *fds: int) -> None:
        """Send a message, and duplicates of `fds` with it.  Raises OSError where the other end is gone."""
        line = json.dumps(message).encode("ascii") + b"\n"
        sent = socket.send_fds(self._sock, [line], list(fds))
        self._sock.sendall(line[sent:])

    def receive(self) -> list[dict[str, Any]]:
        """Wait for bytes and return the messages that they complete.  Raises EOFError once the other end is closed."""
        try:
            data, fds, _, _ = socket.recv_fds(self._sock, _CHUNK, 8)
        except ConnectionResetError:
            data, fds = b"", []
        for fd in fds:
            os.set_inheritable(fd, False)
            self._fds.append(fd)
        if not data:
            raise EOFError("the other end of the channel is closed")
        self._buffer += data
        *lines, rest = self._buffer.split(b"\n")
        self._buffer = rest
        return [json.loads(line) for line in lines]

    def take_fd(self) -> int:
        """Return the oldest descriptor received and not yet taken; it belongs to the caller now."""
        return self._fds.popleft()

    def close(self) -> None:
        """Close the socket and the descriptors that nobody took."""
        self._sock.close()
        while self._fds:
            os.close(self._fds.popleft())
