"""Frames on a stream socket: a header and a body, both of a length announced before.

Owns where one message ends and the next begins, and refuses a length over its limit before any memory is taken for it; of one within,
memory is taken as its bytes arrive.
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
_AT_ONCE = 1 << 22  # bytes that memory is taken for before they have arrived


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
        header_limit: most of them for the header, which is taken apart, and is then many times as large.
    """

    def __init__(self, sock: socket.socket, limit: int, header_limit: int | None = None) -> None:
        self._sock, self._limit = sock, limit
        self._header_limit = limit if header_limit is None else header_limit
        self._header: bytearray | None = None  # None until a frame's lengths are known
        self._reset()

    def read(self, block: bool = True) -> Frame | None:
        """Return the next frame; None where `block` is false and it has not arrived in full.

        Raises EOFError at the end of the stream, WireError where the bytes are no frame or announce too much.
        """
        while True:
            while self._filled < self._wanted:
                if not self._receive(block):
                    return None
            if self._header is None:
                header, self._body_size = self._announced()
                self._header, self._body = bytearray(), bytearray()
                self._aim(self._header, header)
            elif self._target is self._header:
                self._aim(self._body, self._body_size)
            else:
                frame = Frame(bytes(self._header), self._body)
                self._reset()
                return frame

    def _reset(self) -> None:
        self._header, self._body, self._body_size = None, bytearray(), 0
        self._aim(bytearray(), _PREFIX.size)

    def _aim(self, target: bytearray, wanted: int) -> None:
        self._target, self._wanted, self._filled = target, wanted, 0

    def _receive(self, block: bool) -> bool:
        if self._filled == len(self._target):
            self._target.extend(bytes(min(self._wanted - self._filled, _AT_ONCE)))
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

    def _announced(self) -> tuple[int, int]:
        magic, header, body = _PREFIX.unpack(self._target)
        if magic != _MAGIC:
            raise WireError(f"a frame begins with {magic!r}, expected {_MAGIC!r}")
        if header + body > self._limit:
            raise WireError(f"a frame announces {header + body} bytes, the limit is {self._limit}")
        if header > self._header_limit:
            raise WireError(f"a frame announces a header of {header} bytes, the limit is {self._header_limit}")
        return header, body
