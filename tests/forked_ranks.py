"""Two ranks as forked processes, joined by a socket: a rank may die anywhere, and what the other one says still arrives."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any


class Link:
    """One of two ranks' end of a socket: an all-gather of bytes that fails when the other rank is gone."""

    def __init__(self, rank: int, end: socket.socket) -> None:
        self.rank, self.end = rank, end

    def exchange(self, mine: bytes) -> list[bytes]:
        self.end.sendall(len(mine).to_bytes(4, "big") + mine)
        theirs = self._receive(int.from_bytes(self._receive(4), "big"))
        return [mine, theirs] if self.rank == 0 else [theirs, mine]

    def _receive(self, count: int) -> bytes:
        data = self.end.recv(count, socket.MSG_WAITALL)
        if len(data) < count:
            raise ConnectionError("the other rank is gone")
        return data


def two_ranks(body: Callable[[Link], object]) -> list[Any]:
    """Runs `body` on two forked ranks; what each returned, or None if it died."""
    ends, reports = socket.socketpair(), [socket.socketpair() for _ in range(2)]
    children = []
    for rank in range(2):
        child = os.fork()
        if child == 0:
            ends[1 - rank].close()
            signal.alarm(30)
            with suppress(BaseException):
                reports[rank][1].sendall(json.dumps(body(Link(rank, ends[rank]))).encode())
            os._exit(0)
        children.append(child)
    for end in (*ends, *(theirs for _, theirs in reports)):
        end.close()
    said = [b"".join(iter(lambda: ours.recv(65536), b"")) for ours, _ in reports]  # noqa: B023 - called at once
    for child in children:
        os.waitpid(child, 0)
    for ours, _ in reports:
        ours.close()
    return [json.loads(report) if report else None for report in said]
