"""Saving while training goes on: the state is copied first, then written by a thread.

Owns the copy, the thread, and that a failure is heard. Leaves the writing to the callable it is given.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Generic, TypeVar

import torch

from minigpt_dist.checkpoint.errors import CheckpointError
from minigpt_dist.checkpoint.state import State, flatten

__all__ = ["AsyncSaver"]

Saved = TypeVar("Saved")


class AsyncSaver(Generic[Saved]):
    """Calls `write(copy of state, step)` in a thread; one save at a time.

    A save that failed raises at the next `save`, at `wait` or at `close`, whichever comes first; it is never dropped,
    and at interpreter exit an unclosed saver finishes and reports on stderr. On many ranks, each has its saver; `write`
    then exchanges bytes in a thread, so its exchange must have a process group that training does not use.

    Args:
        write: for instance `lambda state, step: save_shard(state, folder, step, rank=..., ...)`.
    """

    def __init__(self, write: Callable[[State, int], Saved]) -> None:
        self._write = write
        self._thread: threading.Thread | None = None
        self._result: Saved | None = None
        self._failure: tuple[int, BaseException] | None = None
        self._closed = False
        atexit.register(self.close)

    def save(self, state: Mapping[str, Any], step: int) -> None:
        """Copies `state` and starts to save it; waits first for the save before, if that still runs.

        On return `state` may be changed at once.

        Raises:
            ValueError: a value that cannot be saved, or the saver is closed.
            CheckpointError: the save before failed. Nothing new is started.
        """
        if self._closed:
            raise ValueError("this AsyncSaver is closed")
        flatten(state)
        self.wait()
        copy = _copied(state)
        self._result = None
        # Not a daemon: an interpreter that exits lets it finish.
        self._thread = threading.Thread(target=self._run, args=(copy, step), name=f"save of step {step}")
        self._thread.start()

    def wait(self) -> Saved | None:
        """Waits for the running save; what `write` returned for the last one, None if there was none.

        Raises:
            CheckpointError: that save failed.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure is not None:
            (step, cause), self._failure = self._failure, None
            raise CheckpointError(f"the save of step {step} failed: {cause}") from cause
        return self._result

    def close(self) -> None:
        """Waits for the running save and takes no more. CheckpointError if it failed; closing again does nothing."""
        self._closed = True
        atexit.unregister(self.close)
        self.wait()

    def __enter__(self) -> AsyncSaver[Saved]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, state: State, step: int) -> None:
        try:
            self._result = self._write(state, step)
        except BaseException as error:  # kept, whatever it is, for the thread that can be told
            self._failure = (step, error)


def _copied(node: Any) -> Any:
    """`node` with new containers and with copies of its tensors; what a state holds besides those cannot change."""
    if isinstance(node, torch.Tensor):
        return node.detach().clone()
    if isinstance(node, Mapping):
        return {key: _copied(value) for key, value in node.items()}
    if isinstance(node, (list, tuple)):
        return [_copied(item) for item in node]
    return node
