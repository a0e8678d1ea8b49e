"""Frames on a stream socket: a header and a body, both of a length announced before.

Owns where one message ends and the next begins, and refuses a length over its limit before any memory is taken for it.
Leaves the meaning of the bytes to `wire` (rank to parent) and `rank` (parent to rank).
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterable
from typing import NamedTuple

from minigpt_dist.launch.errors import WireError

__all__ = ["Frame", "FrameReader", "send_frame"]

_PREFIX = struct.Struct("!4sQQ")  # magic, bytes of header, bytes of body
_MAGIC = b"mgd1"


class Frame(NamedTuple):
    """One message: `header` says what it is, `body` holds its raw bytes."""

    header: bytes
    body: bytearray


def send_frame(sock: socket.socket, header: bytes, blobs: Iterable[bytes | memoryview] = ()) -> None:
    """Send one frame; its body is the blobs, one after the other.  Raises OSError where the peer is gone."""
    blobs = list(blobs)
    size = sum(len(blob) for blob in blobs)
    sock.sendall(_PREFIX.pack(_MAGIC, len(header), size) + header)
    for blob in blobs:
        sock.sendall(blob)


class FrameReader:
    """Takes frames off a socket, whole ones only, and keeps what has arrived of the next.

    Args:
        sock: a connected stream socket.
        limit: most bytes a frame's header and body may announce together.
    """

    def __init__(self, sock: socket.socket, limit: int) -> None:
        self._sock, self._limit = sock, limit
        self._header: bytearray | None = None  # None until a frame's lengths are known
        self._reset()

    def read(self, block: bool = True) -> Frame | None:
        """Return the next frame; None where `block` is false and it has not arrived in full.

        Raises EOFError at the end of the stream, WireError where the bytes are no frame or announce too much.
        """
        while True:
            while self._filled < len(self._target):
                if not self._receive(block):
                    return None
            if self._header is None:
                header, self._body = self._announced()
                self._header = header
                self._aim(header)
            elif self._target is self._header:
                self._aim(self._body)
            else:
                frame = Frame(bytes(self._header), self._body)
                self._reset()
                return frame

    def _reset(self) -> None:
        self._header, self._body = None, bytearray()
        self._aim(bytearray(_PREFIX.size))

    def _aim(self, target: bytearray) -> None:
        self._target, self._filled = target, 0

    def _receive(self, block: bool) -> bool:
        try:
            with memoryview(self._target)[self._filled :] as view:
                count = self._sock.recv_into(view, 0, 0 if block else socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except ConnectionResetError:
            count = 0  # the peer died with our bytes unread: an end of stream like any other
        if count == 0:
            raise EOFError("the peer closed the connection")
        self._filled += count
        return True

    def _announced(self) -> tuple[bytearray, bytearray]:
        magic, header, body = _PREFIX.unpack(self._target)
        if magic != _MAGIC:
            raise WireError(f"a frame begins with {magic!r}, expected {_MAGIC!r}")
        if header + body > self._limit:
            raise WireError(f"a frame announces {header + body} bytes, the limit is {self._limit}")
        return bytearray(header), bytearray(body)
