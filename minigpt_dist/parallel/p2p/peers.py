"""The other ranks of a group, as somebody to send to and receive from.

Owns every send and receive of this package: their bytes are counted, and each wait ends, in a named error if need be.
Leaves what is sent to whom, and what is added to what, to the algorithms.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from minigpt_dist.parallel.collectives import Group, world


class SilentPeerError(RuntimeError):
    """A rank did not send, or did not take, what the algorithm expects of it, within the time limit, or its connection broke.

    peer: its rank in the group. sending: whether it was to take rather than to send.
    """

    def __init__(self, rank: int, peer: int, sending: bool, nbytes: int, timeout_s: float, cause: str) -> None:
        super().__init__(
            f"rank {rank}: rank {peer} {'took' if sending else 'sent'} nothing, but should have "
            f"{'taken' if sending else 'sent'} {nbytes:,} bytes within {timeout_s:g} s ({cause})"
        )
        self.peer, self.sending = peer, sending


class Handle:
    """A collective under way in the background."""

    def __init__(self, future: Future[Any]) -> None:
        self._future = future

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._future.done()

    def wait(self) -> Any:
        """Return what the collective returns, once it has ended; raises what it raised."""
        return self._future.result()


class Peers:
    """The ranks of `group` (default: all), for point-to-point traffic with a time limit.

    One process makes its calls in the same order as every other. `bytes_sent` counts the payload that left this rank.

    Args:
        group: a process group of which this process is a member.
        timeout_s: seconds any single send or receive may take.

    Raises ValueError for a time limit that is not a positive number, or outside a process group.
    """

    def __init__(self, group: Group = None, timeout_s: float = 60.0) -> None:
        if not (timeout_s > 0 and math.isfinite(timeout_s)):
            raise ValueError(f"timeout_s is {timeout_s!r}, but should be a positive number of seconds")
        if not dist.is_initialized():
            raise ValueError("there is no process group, but one should be initialised first")
        self.group, self.timeout_s = group, timeout_s
        self.size, self.rank = world(group)
        if self.rank < 0:
            raise ValueError("this process is not a member of the group, but should be")
        self.bytes_sent = 0
        self._background: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()

    def post(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> Posted:
        """Start sends (to rank, tensor) and receives (from rank, into tensor), tensors contiguous; empty ones need no partner."""
        operations = [(True, peer, t) for peer, t in sends if t.numel()]
        operations += [(False, peer, t) for peer, t in receives if t.numel()]
        if not operations:
            return Posted(self, [], [])
        calls = [
            dist.P2POp(dist.isend if sending else dist.irecv, _raw(t), self._global(peer), self.group)
            for sending, peer, t in operations
        ]
        try:
            works = dist.batch_isend_irecv(calls)
        except RuntimeError as error:  # the connection to a peer is gone
            sending, peer, t = operations[0]
            raise self._silent(sending, peer, t, error) from error
        self.bytes_sent += sum(t.nbytes for sending, _, t in operations if sending)
        return Posted(self, operations, works)

    def exchange(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> None:
        """Send and receive at the same time; return when all have ended. SilentPeerError names a peer that kept this rank waiting."""
        self.post(sends, receives).wait()

    def start(self, collective: Callable[..., Any], *args: Any) -> Handle:
        """`collective(*args, self)` in the background, after whatever was started before: its order is that of the calls."""
        with self._lock:
            if self._background is None:
                self._background = ThreadPoolExecutor(1, thread_name_prefix="minigpt-dist-p2p")
        return Handle(self._background.submit(collective, *args, self))

    def _global(self, peer: int) -> int:
        return peer if self.group is None else dist.get_global_rank(self.group, peer)

    def _silent(self, sending: bool, peer: int, tensor: Tensor, error: BaseException) -> SilentPeerError:
        cause = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        return SilentPeerError(self.rank, peer, sending, tensor.nbytes, self.timeout_s, cause[:200])


class Posted:
    """Sends and receives under way, in the order in which they were given (sends first)."""

    def __init__(self, peers: Peers, operations: list[tuple[bool, int, Tensor]], works: list[dist.Work]) -> None:
        self._peers, self._operations, self._works = peers, operations, works

    def wait(self) -> None:
        """Return when all have ended. SilentPeerError names the first peer that kept this rank waiting."""
        limit = timedelta(seconds=self._peers.timeout_s)
        for (sending, peer, tensor), work in zip(self._operations, self._works, strict=True):
            try:
                work.wait(limit)
            except RuntimeError as error:
                raise self._peers._silent(sending, peer, tensor, error) from error


def _raw(tensor: Tensor) -> Tensor:
    """The same memory as bytes: every dtype can be sent, also those that a backend cannot add."""
    if not tensor.is_contiguous():
        raise ValueError(f"a tensor to send is laid out with strides {tensor.stride()}, but should be contiguous")
    return tensor.detach().view(-1).view(torch.uint8)
