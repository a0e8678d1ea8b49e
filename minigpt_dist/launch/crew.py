"""The ranks of one world as their parent holds them: sockets to talk through, files to look into, power to end them.

Owns a world's sockets and the end of its ranks.
Leaves its files to `crew_files` and what they mean to `autopsy`, making processes to the rank server behind `client`, and
what ranks are told to `world`.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import sys
import time
import weakref
from pathlib import Path
from typing import Any, Literal, NamedTuple

from minigpt_dist.launch.channel import Channel
from minigpt_dist.launch.client import Method, ServerHandle, shared_server, tail
from minigpt_dist.launch.crew_files import CrewFiles, FileKind
from minigpt_dist.launch.environment import rank_environment
from minigpt_dist.launch.errors import LaunchError, WireError
from minigpt_dist.launch.frames import Frame, FrameReader, send_frame
from minigpt_dist.launch.wire import MAX_BYTES

__all__ = ["START_S", "Crew", "Event"]

START_S = 180.0  # to import torch, on a machine busy with other tests; no rank's work is in it
_KILL_S = 60.0  # from SIGKILL to a reaped process: only a stuck kernel takes long


class Event(NamedTuple):
    """Something a rank did: sent a `frame`, closed its socket, sent `garbage`, or ended with an exit `code`."""

    rank: int
    kind: Literal["frame", "closed", "garbage", "exit"]
    frame: Frame | None = None
    code: int | None = None
    text: str = ""


_crews: weakref.WeakSet[Crew] = weakref.WeakSet()


def _disown_crews() -> None:
    for crew in list(_crews):
        crew.disown()


os.register_at_fork(after_in_child=_disown_crews)


class Crew:
    """Fresh ranks, starting up.

    Args:
        world_size: number of ranks.
        method, backend, env: as for `World`.
        folder: where their files go and stay; None for a temporary folder that ends with the crew.
        server: the one that makes them, if not the process's own; one in a sandbox has them in there, whatever `folder` is.
    """

    def __init__(
        self,
        world_size: int,
        method: Method,
        backend: str,
        env: dict[str, str],
        folder: Path | None = None,
        server: ServerHandle | None = None,
    ) -> None:
        self.world_size = world_size
        self.codes: dict[int, int] = {}  # rank -> exit code, of those that have ended
        self._jail = server.jail if server is not None else None
        self._traffic: int | None = None
        self._files = CrewFiles(world_size, folder, self._jail)
        self._socks: dict[int, socket.socket] = {}
        self._readers: dict[int, FrameReader] = {}
        ours, theirs = socket.socketpair()
        self._channel, self._selector = Channel(ours), selectors.DefaultSelector()
        self._selector.register(self._channel, selectors.EVENT_READ, None)
        _crews.add(self)
        try:
            with theirs:
                temporary = str(self._files.path) if self._files.temporary and self._jail is None else None
                self._server = server or shared_server(method)
                self._server.enlist(theirs.fileno(), temporary)
            for rank in range(world_size):
                given = os.environ if self._jail is None else self._jail.env
                self._start(rank, rank_environment(rank, world_size, env, given), method, backend)
        except BaseException:
            self.close()
            raise

    def _start(self, rank: int, env: dict[str, str], method: Method, backend: str) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._tell({"start": rank, "env": env if method == "spawn" else None}, theirs.fileno())
        self._socks[rank], self._readers[rank] = ours, FrameReader(ours, MAX_BYTES)
        self._selector.register(ours, selectors.EVENT_READ, rank)
        config = {
            "rank": rank,
            "world_size": self.world_size,
            "backend": backend,
            "env": env,
            "cwd": os.getcwd() if self._jail is None else self._jail.cwd,
            "path": sys.path if self._jail is None else self._jail.path,
            "folder": self._files.seen_by_ranks(),
            "store": self._files.store,
        }
        self.send(rank, json.dumps(config).encode("ascii"))

    def send(self, rank: int, header: bytes, body: bytes = b"") -> None:
        """Send a frame.  A rank that is gone is no error here: its end shows among the events."""
        sock = self._socks[rank]
        sock.settimeout(START_S)
        try:
            send_frame(sock, header, [body])
        except (BrokenPipeError, ConnectionResetError):
            pass
        except TimeoutError:
            raise LaunchError(f"rank {rank} has not taken {len(body)} bytes within {START_S:g} s") from None
        finally:
            sock.settimeout(None)  # reading never waits: `events` has

    def events(self, timeout: float) -> list[Event]:
        """Wait at most `timeout` seconds for ranks to do something; every rank's events in their order.

        Raises LaunchError if the server is gone.
        """
        ready = {key.data for key, _ in self._selector.select(max(0.0, timeout))}
        # One event a rank and call: a rank that never stops sending cannot keep the caller from its deadline.
        events = [event for rank in sorted(ready - {None}) if (event := self._read(rank))]
        if None in ready:
            for message in self._receive():
                if "traffic" in message:
                    self._traffic = message["traffic"]
                    continue
                rank, self.codes[message["exit"]] = message["exit"], message["code"]
                while event := self._read(rank):  # its last words first
                    events.append(event)
                events.append(Event(rank, "exit", code=message["code"]))
        return events

    def _tell(self, message: dict[str, Any], *fds: int) -> None:
        try:
            self._channel.send(message, *fds)
        except OSError:
            raise self._server.lost() from None

    def _receive(self) -> list[dict[str, int]]:
        try:
            return self._channel.receive()
        except EOFError:
            self._selector.unregister(self._channel)
            raise self._server.lost() from None

    def _read(self, rank: int) -> Event | None:
        """The next thing that has arrived from one rank; nothing more is read after an end or garbage."""
        if rank not in self._readers:
            return None
        try:
            frame = self._readers[rank].read(block=False)
        except EOFError:
            self._shut(rank)
            return Event(rank, "closed")
        except WireError as error:
            self._shut(rank)
            return Event(rank, "garbage", text=str(error))
        return Event(rank, "frame", frame) if frame is not None else None

    def _shut(self, rank: int) -> None:
        del self._readers[rank]
        self._selector.unregister(self._socks[rank])

    def ask_stacks(self, ranks: list[int], grace_s: float) -> list[Event]:
        """Have ranks write their Python stacks and end; return the events until they have, or `grace_s` is over."""
        self._tell({"stacks": [rank for rank in ranks if rank not in self.codes]})
        return self._until_ended(ranks, grace_s)

    def traffic(self, limit_s: float = 10.0) -> int | None:
        """Bytes that ranks have sent each other, by any way but files and memory, in all worlds of their sandbox so far.

        Counted by its server, out of their reach; None where they have no network of their own, or no answer came.
        """
        if self._jail is None or not self._jail.walled:
            return None
        self._traffic, limit = None, time.monotonic() + limit_s
        self._tell({"traffic": True})
        while self._traffic is None and time.monotonic() < limit and not self.codes:
            self.events(limit - time.monotonic())
        return self._traffic

    def kill(self) -> list[Event]:
        """End and reap every rank; return what still arrived.  Raises LaunchError if one outlives SIGKILL."""
        ranks = [rank for rank in range(self.world_size) if rank not in self.codes]
        self._tell({"kill": ranks})
        events = self._until_ended(ranks, _KILL_S)
        left = [rank for rank in ranks if rank not in self.codes]
        if left:
            raise LaunchError(f"ranks {left} have not ended {_KILL_S:g} s after SIGKILL")
        return events

    def _until_ended(self, ranks: list[int], limit_s: float) -> list[Event]:
        limit, events = time.monotonic() + limit_s, []
        while not self.codes.keys() >= set(ranks) and time.monotonic() < limit:
            events += self.events(limit - time.monotonic())
        return events

    def file(self, rank: int, kind: FileKind) -> int:
        """Return the descriptor of one of a rank's files, open for reading."""
        return self._files.file(rank, kind)

    def tail(self, rank: int) -> str:
        """The end of what a rank has printed since it started."""
        return tail(self._files.file(rank, "log"))

    def server_output(self) -> str:
        """The end of what was printed by the server, and by ranks before they had started."""
        return self._server.output()

    def close(self) -> None:
        """End the ranks, wait for them, and remove the folder if it was temporary.  Safe to call twice."""
        if self not in _crews:
            return
        try:
            with contextlib.suppress(LaunchError):  # the server is gone, and its ranks with it
                self.kill()
        finally:
            self.disown()
            self._files.remove()

    @property
    def usable(self) -> bool:
        """Whether the ranks are this process's and none has ended."""
        return self in _crews and not self.codes

    def disown(self) -> None:
        """Close this process's descriptors and nothing else."""
        _crews.discard(self)
        self._selector.close()
        self._channel.close()
        for sock in self._socks.values():
            sock.close()
        self._files.disown()
