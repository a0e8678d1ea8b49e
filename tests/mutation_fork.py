"""Tests in a fork of a process that has loaded everything but the package: what makes a mutant cost a second, not ten.

Owns the forks, the rank server's among them, their limits and their end. Leaves what is changed and what is run to `mutate.py`.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os

os.environ.update(
    OMP_NUM_THREADS="1", MKL_NUM_THREADS="1"
)  # before torch: no pool of threads may stand when a process forks

import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis  # imported once, for all forks, as all below
import pytest
import rich.console  # noqa: F401
import safetensors.torch  # noqa: F401  # with it torch
import torch._dynamo  # noqa: F401  # the first optimizer imports it

gc.collect()
gc.freeze()  # no fork has to look through what is loaded here
LATE = re.compile(r"DeadlineExceeded|\+ Timeout \+")  # what the launcher, and pytest-timeout, say of what does not end
SERVER = "minigpt_dist.launch.server"  # what the code of a rank server imports


class _ForkedServer:
    """Stands for the Popen object of a rank server that was forked instead of started."""

    def __init__(self, pid: int) -> None:
        self.pid, self.returncode = pid, None

    def poll(self) -> int | None:
        return self._reap(os.WNOHANG)

    def wait(self, timeout: float | None = None) -> int | None:
        return self._reap(0)

    def _reap(self, options: int) -> int | None:
        if self.returncode is None:
            done, status = os.waitpid(self.pid, options)
            self.returncode = os.waitstatus_to_exitcode(status) if done else None
        return self.returncode


def _seat(asked: socket.socket) -> None:
    """In the fork that is to be the rank server: wait for the command line and be it; never returns."""
    try:
        text, fds, _, _ = socket.recv_fds(asked, 1 << 20, 2)
        if text:
            os.setsid()
            command, env = json.loads(text)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            for stream in (1, 2):
                os.dup2(fds[1], stream)
            os.environ.update(env)
            control = command.index("-c") + 3  # code, sys.path, descriptor
            sys.argv = ["-c", *command[command.index("-c") + 2 :]]
            sys.argv[2] = str(fds[0])
            assert command[control].isdigit()
            exec(command[command.index("-c") + 1], {"__name__": "__main__"})
    finally:
        os._exit(1)


def _fork_the_first_server() -> None:
    """Let this process's first rank server be a fork made now, before the package is imported; later ones start as ever."""
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        _seat(theirs)
    theirs.close()
    start, waiting = subprocess.Popen, [pid]

    def popen(command: Any, *args: Any, **options: Any) -> Any:
        if not (
            waiting and isinstance(command, list) and "-c" in command and SERVER in command[command.index("-c") + 1]
        ):
            return start(command, *args, **options)
        text = json.dumps([command, options["env"]]).encode()
        socket.send_fds(ours, [text], [options["pass_fds"][0], options["stdout"].fileno()])
        return _ForkedServer(waiting.pop())

    subprocess.Popen = popen  # type: ignore[assignment,misc]


class _Haste:
    """A plugin of pytest. No job of a world waits longer than `most_s`: a mutant that makes ranks wait for ever is soon found out.

    And hypothesis draws the same examples each time, and looks for no smaller one where one fails.
    """

    def __init__(self, most_s: float) -> None:
        self.most_s = most_s

    def pytest_collection(self) -> None:
        drawn = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
        hypothesis.settings.register_profile(
            "mutation", hypothesis.settings.default, phases=drawn, derandomize=True, database=None
        )
        hypothesis.settings.load_profile("mutation")
        from minigpt_dist.launch import world  # not before: pytest rewrites the package's assertions as it is imported

        checked: Callable[[float], float] = world._checked_deadline
        world._checked_deadline = lambda deadline_s: min(checked(deadline_s), self.most_s)


def _run(arguments: str, deadline_s: float, log: Path) -> int:
    for stream in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    sys.path[:0] = [os.getcwd()]
    _fork_the_first_server()
    loaded = ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # hypothesis, whose assertions are not the tests
    limits = ["--timeout", str(1.5 * deadline_s)]  # of one test: a loop without end in this process
    options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *loaded, *limits, *shlex.split(arguments)]
    return int(pytest.main(options, plugins=[_Haste(deadline_s)]))


def outcome(arguments: str, limit_s: float, deadline_s: float, log: Path) -> str:
    """How the tests ended, in a fork that has not imported the package: passed, failed, or late, where something did not end.

    deadline_s: for any one job of ranks; limit_s: for all.
    """
    child = os.fork()
    if child == 0:
        os.setsid()  # a group of its own, which can be ended with all that the tests started
        code = 1
        try:
            code = _run(arguments, deadline_s, log)
        except BaseException as error:  # the mutant cannot be imported
            print(repr(error), file=sys.stderr)
        finally:
            os._exit(code)  # nothing of the parent's, the copy's removal above all, is this process's to do
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            if os.waitstatus_to_exitcode(status) == 0:
                return "passed"
            return "late" if LATE.search(log.read_text(errors="replace")) else "failed"
        time.sleep(0.01)  # between two looks at a child that has a limit; a pidfd would be Linux alone
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "late"
