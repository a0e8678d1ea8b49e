"""A bar that follows a run by its live metrics, where someone is looking.

Owns the bar and its thread. Reads rank 0's metrics file, which the run writes anyway, so no rank knows of it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

POLL_S = 0.1


@contextmanager
def progress(folder: Path | None, what: str, steps: int) -> Iterator[None]:
    """Show a bar for the length of the block, if stdout is a terminal and there is a folder to watch."""
    if folder is None or not sys.stdout.isatty():
        yield
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("steps"))
    with Progress(*columns, transient=True) as bar:
        task, over = bar.add_task(what, total=steps), threading.Event()

        def follow() -> None:
            while not over.wait(POLL_S):
                bar.update(task, completed=_steps_done(folder))

        thread = threading.Thread(target=follow, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


def _steps_done(folder: Path) -> int:
    """Records of rank 0 so far but the first, which is the state before training."""
    try:
        return max((folder / "metrics-rank0.jsonl").read_bytes().count(b"\n") - 1, 0)
    except OSError:
        return 0
