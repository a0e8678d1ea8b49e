"""The parent's rank servers: one a process and method, started on first use, gone with the process; and those in sandboxes.

Owns their start, their end, and what becomes of them when the parent itself forks.  Leaves asking them for ranks to
`crew`.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from typing import Literal

from minigpt_dist.launch.channel import Channel
from minigpt_dist.launch.environment import PINNED_THREADS
from minigpt_dist.launch.errors import LaunchError, ServerLost
from minigpt_dist.launch.sandbox.jail import Jail

__all__ = ["Method", "ServerHandle", "prepare", "shared_server", "tail"]

Method = Literal["fork", "spawn"]
_TAIL_BYTES = 4096
_PRELOAD_IF_LOADED = ("pytest", "hypothesis", "rich")  # bodies often live in modules that import these
_COMMAND = """import sys, json
sys.path[:] = json.loads(sys.argv[1])
from minigpt_dist.launch.server import main
main(int(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4]))"""


class ServerHandle:
    """A running rank server of this process: the shared one of a method, or one inside a sandbox, which it ends with itself.

    `jail` is the sandbox, None for a server that runs as the parent does.
    """

    def __init__(self, method: Method, jail: Jail | None = None) -> None:
        self.jail = jail
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - it stays open as long as the server writes
        ours, theirs = socket.socketpair()
        self._control = Channel(ours)
        self._process: subprocess.Popen[bytes] | None = None
        with theirs:
            if jail is not None:
                jail.enter(theirs.fileno(), self._log.fileno())
                _jailed.add(self)
            else:
                self._process = self._start(method, theirs.fileno())

    def _start(self, method: Method, control: int) -> subprocess.Popen[bytes]:
        preload = [name for name in _PRELOAD_IF_LOADED if name in sys.modules]
        arguments = [json.dumps(sys.path), str(control), method, json.dumps(preload)]
        return subprocess.Popen(
            [sys.executable, "-c", _COMMAND, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env={**os.environ, **PINNED_THREADS},
            pass_fds=[control],
            start_new_session=True,  # a Ctrl-C at the terminal is for the parent, which then ends the ranks
        )

    def enlist(self, channel_fd: int, temporary: str | None) -> None:
        """Give the server the far end of a crew's channel, and the folder to remove after the crew."""
        try:
            self._control.send({"crew": temporary}, channel_fd)
        except OSError:
            raise self.lost() from None

    def lost(self) -> LaunchError:
        """What to raise where the server no longer answers."""
        return ServerLost(f"the rank server has died; its last output:\n{self.output()}")

    def output(self) -> str:
        """The end of what the server, and ranks that had no file yet, have printed."""
        return "\n".join(filter(None, (tail(self._log.fileno()), self.jail.last_words if self.jail else "")))

    def close(self) -> None:
        """End the server, and its ranks with it, and wait for it."""
        self._control.close()
        if self.jail is not None:
            _jailed.discard(self)
            self.jail.close()
        if self._process is not None:
            self._process.wait()
        self._log.close()

    @property
    def ended(self) -> bool:
        """Whether the server's process is gone."""
        if self.jail is not None:
            return self.jail.ended
        return self._process is None or self._process.poll() is not None

    def disown(self) -> None:
        """In a forked child: let go of what is the parent's, or the server would outlive it by the copy here."""
        self._control.close()
        if self._process is not None:
            self._process.returncode = 0  # not this process's child to wait for
        if self.jail is not None:
            self.jail.disown()


_servers: dict[Method, ServerHandle] = {}
_jailed: set[ServerHandle] = set()
_lock = threading.Lock()


def prepare() -> None:
    """Start the rank server ahead of the first world, so that it loads what ranks need while this process goes on.

    Only where ranks are forked: spawned ones load everything themselves.
    """
    if sys.platform == "linux":
        with _lock:
            _running("fork")


def shared_server(method: Method) -> ServerHandle:
    """This process's own server of a method."""
    with _lock:
        return _running(method)


def _running(method: Method) -> ServerHandle:
    """This process's server, a new one if it has none or the old one has ended. The caller holds `_lock`."""
    server = _servers.get(method)
    if server is not None and server.ended:
        server.close()
        server = None
    if server is None:
        server = _servers[method] = ServerHandle(method)
    return server


def tail(fd: int) -> str:
    """The last few kilobytes of an open file, as text."""
    size = os.fstat(fd).st_size
    return os.pread(fd, _TAIL_BYTES, max(0, size - _TAIL_BYTES)).decode(errors="replace").strip()


@atexit.register
def _close_servers() -> None:
    while _servers:
        _servers.popitem()[1].close()
    while _jailed:
        _jailed.pop().close()


def _disown_servers() -> None:
    global _lock
    _lock = threading.Lock()  # another thread of the parent may have held the old one
    while _servers:
        _servers.popitem()[1].disown()
    while _jailed:
        _jailed.pop().disown()


os.register_at_fork(after_in_child=_disown_servers)
