"""The rank server: a clean, single-threaded process that makes ranks on request, by fork or by spawn.

Owns the ranks' pids: it alone signals and reaps them, so no signal ever reaches a recycled pid.  Ends, and its ranks
with it, as soon as the parent's socket closes, however the parent ended.
Leaves what a rank does to `rank`, and the asking to `crew`.

From the parent, on the control channel: {"crew": folder to remove, or null} with a descriptor of a new channel.
On a crew's channel: {"start": rank, "env": ..} with the rank's socket; {"stacks": [ranks]}; {"kill": [ranks]}; {"count": "traffic" or
"held"}.
To the parent: {"exit": rank, "code": exit code}; {"count": bytes}.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from minigpt_dist.launch.channel import Channel
from minigpt_dist.launch.limits import Limits, become, confine
from minigpt_dist.launch.preload import preload
from minigpt_dist.launch.procfs import children, held_bytes, loopback_bytes, private_bytes_of_others

__all__ = ["main"]

_WATCH_S = 0.25
_SPAWNED = """import sys, json
sys.path[:] = json.loads(sys.argv[1])
from minigpt_dist.launch.rank import main
main(*map(int, sys.argv[2:]))"""


@dataclass
class _Crew:
    """The ranks of one world: its channel, the temporary folder to remove after it, pids by rank."""

    channel: Channel
    folder: str | None
    pids: dict[int, int] = field(default_factory=dict)


def main(control_fd: int, method: str, also_preload: list[str], sandbox: list[Any] | None = None) -> None:
    """Serve until the parent is gone; never returns.  In a process forked off as a rank, be that rank.

    `sandbox` holds the limits for all processes, and the user that ranks become, where the server is in one.
    """
    if method == "fork":
        preload(also_preload)
    if sandbox is not None:
        serve_sandbox(control_fd, sandbox)
    _serve(control_fd, method, None)


def serve_sandbox(control_fd: int, sandbox: list[Any]) -> None:
    """Serve from inside a sandbox, where this process has loaded all that its ranks need; never returns."""
    limits, user, walled = Limits(*sandbox[0]), sandbox[1], sandbox[2]
    confine(limits)
    _serve(control_fd, "fork", lambda: become(user, walled), limits.total_bytes if walled else 0)


def _serve(control_fd: int, method: str, settle: Callable[[], None] | None, most_bytes: int = 0) -> None:
    """`settle` is what a forked rank of a sandbox does first; `most_bytes` is for all its processes together, 0 for any number."""
    server = _Server(Channel(socket.socket(fileno=control_fd)), method, settle is not None, most_bytes)
    parent = os.getpid()
    seat = server.serve()
    if seat is not None:
        from minigpt_dist.launch.rank import main as be_rank

        if settle is not None:
            settle()
        be_rank(seat, parent, server.lifeline)
    os._exit(0)  # an interpreter's long farewell would only keep the parent waiting


class _Server:
    def __init__(self, control: Channel, method: str, adopts: bool = False, most_bytes: int = 0) -> None:
        self._method, self._control, self._adopts, self._most_bytes = method, control, adopts, most_bytes
        self._crews: list[_Crew] = []
        self._selector = selectors.DefaultSelector()
        self._woken, self._wake = socket.socketpair()
        self.lifeline, self._lifeline_held = os.pipe()  # reads end-of-file in a rank once this process is gone
        for sock in (self._woken, self._wake):
            sock.setblocking(False)
        signal.signal(signal.SIGCHLD, _noted)
        signal.set_wakeup_fd(self._wake.fileno())
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        self._selector.register(control, selectors.EVENT_READ, control)

    def serve(self) -> int | None:
        """Handle requests.  Returns None when the parent is gone, and the rank's socket in a forked rank."""
        while True:
            for key, _ in self._events():
                if key.data is self._control:
                    if not self._new_crews():
                        self._end()
                        return None
                elif isinstance(key.data, _Crew):
                    seat = self._serve_crew(key.data)
                    if seat is not None:
                        return seat
                else:
                    self._woken.recv(4096)
                    self._reap()

    def _events(self) -> list[tuple[selectors.SelectorKey, int]]:
        """Wait for something to handle; meanwhile end all ranks of a sandbox that together take too much memory."""
        if not self._most_bytes or not any(crew.pids for crew in self._crews):
            return self._selector.select()
        events = self._selector.select(_WATCH_S)
        if private_bytes_of_others() > self._most_bytes:
            os.kill(-1, signal.SIGKILL)  # every process in sight but this one and process 1
        return events

    def _new_crews(self) -> bool:
        try:
            messages = self._control.receive()
        except EOFError:
            return False
        for message in messages:
            crew = _Crew(Channel(socket.socket(fileno=self._control.take_fd())), message["crew"])
            self._crews.append(crew)
            self._selector.register(crew.channel, selectors.EVENT_READ, crew)
        return True

    def _serve_crew(self, crew: _Crew) -> int | None:
        try:
            messages = crew.channel.receive()
        except EOFError:
            self._dismiss(crew)
            return None
        for message in messages:
            if "start" in message:
                seat = crew.channel.take_fd()
                if self._start(crew, message["start"], seat, message["env"]):
                    return seat
            elif "count" in message:
                with contextlib.suppress(OSError):
                    crew.channel.send({"count": {"traffic": loopback_bytes, "held": held_bytes}[message["count"]]()})
            elif "stacks" in message:
                self._ask_stacks([crew.pids[rank] for rank in message["stacks"] if rank in crew.pids])
            else:
                self._reap()  # who died before this kill died on its own: say so first
                _kill(crew.pids[rank] for rank in message["kill"] if rank in crew.pids)
        return None

    def _start(self, crew: _Crew, rank: int, seat: int, env: dict[str, str]) -> bool:
        """Make a rank; true in the rank itself, where it was forked."""
        if self._method == "fork":
            pid = os.fork()
            if pid == 0:
                self._forget_all()
                return True
        else:
            pid = self._spawn(seat, env)
        os.close(seat)
        crew.pids[rank] = pid
        return False

    def _spawn(self, seat: int, env: dict[str, str]) -> int:
        for fd in (seat, self.lifeline):
            os.set_inheritable(fd, True)
        numbers = [str(number) for number in (seat, os.getpid(), self.lifeline)]
        return os.posix_spawn(sys.executable, [sys.executable, "-c", _SPAWNED, json.dumps(sys.path), *numbers], env)

    @staticmethod
    def _ask_stacks(pids: list[int]) -> None:
        """Have each rank write its stack and die of it.

        All are stopped first: else one that goes early would change what the others are shown doing.
        """
        for signum in (signal.SIGSTOP, signal.SIGUSR1, signal.SIGCONT):
            for pid in pids:
                os.kill(pid, signum)

    def _reap(self) -> None:
        for crew in list(self._crews):
            for rank, pid in list(crew.pids.items()):
                code = _exit_code(pid)
                if code is not None:
                    del crew.pids[rank]
                    with contextlib.suppress(OSError):  # the asking end may be gone
                        crew.channel.send({"exit": rank, "code": code})
        if self._adopts:
            self._reap_adopted()

    def _reap_adopted(self) -> None:
        """Reap what ranks have left behind: a daemon that has ended is still one of the few processes allowed."""
        own = {pid for crew in self._crews for pid in crew.pids.values()}
        with contextlib.suppress(ChildProcessError):
            while True:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if ended is None or ended.si_pid in own:
                    return
                os.waitpid(ended.si_pid, 0)

    def _dismiss(self, crew: _Crew) -> None:
        """End a crew whose parent has closed its channel."""
        self._selector.unregister(crew.channel)
        self._crews.remove(crew)
        _kill(crew.pids.values())
        for pid in crew.pids.values():
            os.waitpid(pid, 0)
        crew.channel.close()
        if crew.folder is not None:
            shutil.rmtree(crew.folder, ignore_errors=True)  # gone already, unless the parent was killed

    def _end(self) -> None:
        for crew in list(self._crews):
            self._dismiss(crew)
        while self._adopts and (left := children()):
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, 0)

    def _forget_all(self) -> None:
        """In a forked rank: drop everything that is the server's."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._selector.close()
        for channel in (self._control, *(crew.channel for crew in self._crews)):
            channel.close()
        self._woken.close()
        self._wake.close()
        os.close(self._lifeline_held)


def _noted(signum: int, frame: FrameType | None) -> None:
    """A handler must exist for the wake-up descriptor to be written."""


def _kill(pids: Any) -> None:
    """Kill unreaped children, each with all the processes of its session's first group."""
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it has no session of its own yet, or has ended
            os.killpg(pid, signal.SIGKILL)


def _exit_code(pid: int) -> int | None:
    """Reap a child that has ended and whatever is left of its process group; None where it still runs."""
    if hasattr(os, "waitid"):
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)  # before reaping: until then the number cannot be another's
    reaped, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if reaped else None
