"""Grading processes as the grader sees them: started, told, listened to, replaced when they are killed.

Owns the grader's side of `worker`'s line protocol, its deadlines, and the same without any process (`-n 0`). Leaves which group goes
where to `engine`.
"""

from __future__ import annotations

import gc
import json
import os
import selectors
import subprocess
import sys
import time
from typing import Any, Protocol

from minigpt_dist.grading.answers import Answer
from minigpt_dist.grading.grader import OURS, Grader, Order, broken
from minigpt_dist.grading.plan import Group
from minigpt_dist.launch.environment import PINNED_THREADS

START_S = 120.0  # for a process to import torch on a busy machine
MAX_LINE = 1 << 22


class WorkerLostError(Exception):
    """A grading process ended, or said nothing sensible, before it had answered."""


class OutOfTimeError(Exception):
    """A submission's time is over."""


class BrokenGraderError(Exception):
    """Ours to mend: grading processes or sandboxes cannot be started here."""


class Lane(Protocol):
    """Something that grades one submission after another, a group at a time.

    prepare: begin to start what it needs, without waiting. open: start on a submission; what it offers where `inspect`.
    ask: the answers of one group, until `limit` of the monotonic clock. close: end everything.
    end: from any thread, for good: what is being asked is given up, and nothing more is started.
    Raises WorkerLostError, OutOfTimeError, BrokenGraderError.
    """

    def prepare(self) -> None: ...

    def open(self, order: Order, *, inspect: bool, limit: float) -> dict[str, Any]: ...

    def ask(self, group: Group, limit: float) -> list[Answer]: ...

    def close(self) -> None: ...

    def end(self) -> None: ...


class Inline:
    """A lane in the grader's own process: no worker, the same answers."""

    def __init__(self) -> None:
        self._grader: Grader | None = None

    def prepare(self) -> None:
        """There is nothing to start."""

    def open(self, order: Order, *, inspect: bool, limit: float) -> dict[str, Any]:
        self.close()
        try:
            self._grader = Grader(order)
            return self._grader.inspect() if inspect else {}
        except OURS as error:
            raise BrokenGraderError(broken(error)) from None

    def ask(self, group: Group, limit: float) -> list[Answer]:
        assert self._grader is not None, "ask before open"
        found = []
        try:
            for answer in self._grader.answer(group):
                found.append(answer)
                if time.monotonic() > limit:
                    raise OutOfTimeError
        except OURS as error:
            raise BrokenGraderError(broken(error)) from None
        return found

    def close(self) -> None:
        grader, self._grader = self._grader, None
        if grader is not None:
            grader.close()
            del grader
            gc.collect()  # as in a process of its own: evidence and errors form cycles

    end = close


class Process:
    """A lane in a process of its own, started with the first submission and kept for the next."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._buffer = b""
        self._ready = self._ended = False

    def open(self, order: Order, *, inspect: bool, limit: float) -> dict[str, Any]:
        try:
            self._await_ready()
            self._send({"do": "open", "order": order.to_dict(), "inspect": inspect})
            found: dict[str, Any] = self._receive("opened", limit)
        except (WorkerLostError, OutOfTimeError):
            self.kill()
            raise
        return found

    def ask(self, group: Group, limit: float) -> list[Answer]:
        try:
            self._send({"do": "ask", "group": group.to_dict()})
            found: list[Answer] = []
            while True:
                message = self._message(limit)
                if "answer" in message:
                    found.append(Answer.from_dict(message["answer"]))
                elif message.get("done") == group.name:
                    return found
                else:
                    raise BrokenGraderError(str(message.get("broken", message)))
        except (WorkerLostError, OutOfTimeError):
            self.kill()
            raise

    def close(self) -> None:
        """End the process and its ranks, gently if it answers."""
        if self._process is not None and self._process.stdin is not None:
            try:
                self._process.stdin.close()
                self._process.wait(timeout=10)
            except (OSError, subprocess.TimeoutExpired):
                pass
        self.kill()

    def end(self) -> None:
        self._ended = True
        if self._process is not None:
            self._process.kill()  # whoever listens to it hears the end of its stream

    def kill(self) -> None:
        """End the process at once; its ranks and sandboxes notice and follow."""
        process, self._process, self._buffer, self._ready = self._process, None, b"", False
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()

    def prepare(self) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        self.kill()
        if self._ended:
            raise BrokenGraderError("grading was interrupted")
        self._process = subprocess.Popen(
            [sys.executable, "-c", _COMMAND, json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **PINNED_THREADS},
            start_new_session=True,  # a Ctrl-C is for the grader, which then ends the workers
        )

    def _await_ready(self) -> None:
        self.prepare()
        try:
            if not self._ready:
                self._ready = bool(self._receive("ready", time.monotonic() + START_S))
        except (WorkerLostError, OutOfTimeError):
            self.kill()
            raise BrokenGraderError("a grading process could not be started") from None

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode("ascii") + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise WorkerLostError from None

    def _receive(self, key: str, limit: float) -> Any:
        message = self._message(limit)
        if key not in message:
            raise BrokenGraderError(str(message.get("broken", message)))
        return message[key]

    def _message(self, limit: float) -> dict[str, Any]:
        """The next line, as JSON. WorkerLostError at the end of the stream or for anything else, OutOfTimeError past `limit`."""
        line = self._line(limit)
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            raise WorkerLostError from None
        if not isinstance(message, dict):
            raise WorkerLostError
        return message

    def _line(self, limit: float) -> bytes:
        assert self._process is not None
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                if not selector.select(max(0.0, limit - time.monotonic())):
                    raise OutOfTimeError
                chunk = os.read(self._process.stdout.fileno(), 1 << 16)
                if not chunk or len(self._buffer) > MAX_LINE:
                    raise WorkerLostError
                self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line


_COMMAND = """import sys, json
sys.path[:] = json.loads(sys.argv[1])
from minigpt_dist.grading.worker import main
main()"""
