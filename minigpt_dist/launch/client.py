"""The parent's rank servers: one a process and method, started on first use, gone with the process.

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
from minigpt_dist.launch.errors import LaunchError

__all__ = ["Method", "ServerHandle", "prepare", "tail"]

Method = Literal["fork", "spawn"]
_TAIL_BYTES = 4096
_PRELOAD_IF_LOADED = ("pytest", "hypothesis", "rich")  # bodies often live in modules that import these
_COMMAND = """import sys, json
sys.path[:] = json.loads(sys.argv[1])
from minigpt_dist.launch.server import main
main(int(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4]))"""


class ServerHandle:
    """A running rank server of this process; get one by `enlist`."""

    def __init__(self, method: Method) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - it stays open as long as the server writes
        ours, theirs = socket.socketpair()
        self._control = Channel(ours)
        preload = [name for name in _PRELOAD_IF_LOADED if name in sys.modules]
        arguments = [json.dumps(sys.path), str(theirs.fileno()), method, json.dumps(preload)]
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _COMMAND, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                env={**os.environ, **PINNED_THREADS},
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # a Ctrl-C at the terminal is for the parent, which then ends the ranks
            )

    @staticmethod
    def enlist(method: Method, channel_fd: int, temporary: str | None) -> ServerHandle:
        """Give this process's server the far end of a crew's channel, and the folder to remove after the crew."""
        with _lock:
            server = _running(method)
            try:
                server._control.send({"crew": temporary}, channel_fd)
            except OSError:
                raise server.lost() from None
            return server

    def lost(self) -> LaunchError:
        """What to raise where the server no longer answers."""
        return LaunchError(f"the rank server has died; its last output:\n{self.output()}")

    def output(self) -> str:
        """The end of what the server, and ranks that had no file yet, have printed."""
        return tail(self._log.fileno())

    def close(self) -> None:
        """End the server, and its ranks with it, and wait for it."""
        self._control.close()
        self._process.wait()
        self._log.close()

    def disown(self) -> None:
        """In a forked child: let go of what is the parent's, or the server would outlive it by the copy here."""
        self._control.close()
        self._process.returncode = 0  # not this process's child to wait for


_servers: dict[Method, ServerHandle] = {}
_lock = threading.Lock()


def prepare() -> None:
    """Start the rank server ahead of the first world, so that it loads what ranks need while this process goes on.

    Only where ranks are forked: spawned ones load everything themselves.
    """
    if sys.platform == "linux":
        with _lock:
            _running("fork")


def _running(method: Method) -> ServerHandle:
    """This process's server, a new one if it has none or the old one has ended. The caller holds `_lock`."""
    server = _servers.get(method)
    if server is not None and server._process.poll() is not None:
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


def _disown_servers() -> None:
    global _lock
    _lock = threading.Lock()  # another thread of the parent may have held the old one
    while _servers:
        _servers.popitem()[1].disown()


os.register_at_fork(after_in_child=_disown_servers)
