"""A second home for finished checkpoints: a folder on another disk or a mounted store, filled behind training's back.

Each copy is a complete checkpoint of its own: its bytes are verified against the source's manifest as they are read,
it gets a manifest from what was written, and appears by the same single rename. The second root has its own `latest`.

Owns the queue of one, the retries, and the account of what went wrong. Leaves the commit to `commit`.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

from minigpt_dist.checkpoint.commit import commit, payload_of, workspace
from minigpt_dist.checkpoint.errors import CheckpointError, mismatch, naming_file
from minigpt_dist.checkpoint.files import write_file
from minigpt_dist.checkpoint.folder import open_checkpoint
from minigpt_dist.checkpoint.manifest import Manifest, ShardRecord
from minigpt_dist.checkpoint.shard_file import read_verified

__all__ = ["SecondTier", "TierReport", "copy_checkpoint"]


def copy_checkpoint(src_dir: Path | str, dest_root: Path | str) -> Manifest:
    """Copies one checkpoint into the folder of checkpoints `dest_root` and makes it the latest there.

    Raises:
        CheckpointError: the source is damaged, or the disk refused; what `dest_root` had is untouched.
    """
    with open_checkpoint(src_dir) as (folder, manifest), workspace(Path(dest_root)) as temporary:
        payload = payload_of(temporary, manifest.step)
        with naming_file(payload, "to make a folder"):
            os.mkdir(payload)
        written = tuple(_copy_shard(folder / shard.file, payload / shard.file, shard) for shard in manifest.shards)
        copied = replace(manifest, shards=written)
        commit(temporary, copied)
    return copied


def _copy_shard(source: Path, target: Path, record: ShardRecord) -> ShardRecord:
    """Copies one verified file; the record says what was written, not what should have been."""
    content = read_verified(source, record)
    digest = write_file(target, len(content), [memoryview(content)])
    written = replace(record, bytes=len(content), sha256=digest.sha256, crc32=digest.crc32)
    if written != record:
        raise mismatch(target, f"a copy with crc32 {record.crc32}, sha256 {record.sha256}", written)
    return written


@dataclass(frozen=True)
class TierReport:
    """What became of one submitted checkpoint: "copied", "replaced" by a newer one while waiting, or "failed"."""

    folder: Path
    outcome: str
    attempts: int
    cause: str | None = None


class SecondTier:
    """Copies finished checkpoints to `dest_root` in a thread; `submit` never waits.

    At most one copy runs and one waits: a checkpoint submitted while another waits takes its place, so a slow store
    falls behind by skipping, never by holding training up. Failures are kept in `reports` and raised by `close`.

    Args:
        retries: how often a failed copy is tried again.
        pause: seconds between tries, cut short by `close`.
    """

    def __init__(self, dest_root: Path | str, *, retries: int = 2, pause: float = 1.0) -> None:
        if type(retries) is not int or retries < 0 or not pause >= 0:
            raise ValueError(f"retries and pause are {retries!r} and {pause!r}, but should be at least 0")
        self._dest_root, self._retries, self._pause = Path(dest_root), retries, pause
        self._reports: list[TierReport] = []
        self._waiting: Path | None = None
        self._changed, self._closing = threading.Condition(), threading.Event()
        # A daemon: a store that hangs must not keep the process from ending. A copy cut off leaves nothing visible.
        self._thread = threading.Thread(target=self._run, name="second tier", daemon=True)
        self._thread.start()

    @property
    def reports(self) -> list[TierReport]:
        """What became of each checkpoint so far, in the order they ended."""
        with self._changed:
            return list(self._reports)

    def submit(self, folder: Path | str) -> None:
        """Asks for a copy of the checkpoint in `folder`, one checkpoint's own folder. ValueError if closed."""
        with self._changed:
            if self._closing.is_set():
                raise ValueError("this SecondTier is closed")
            if self._waiting is not None:
                self._reports.append(TierReport(self._waiting, "replaced", 0))
            self._waiting = Path(folder)
            self._changed.notify()

    def close(self, timeout: float = 60.0) -> None:
        """Waits up to `timeout` seconds for what was submitted.

        Raises:
            CheckpointError: a copy failed, or is still not done; names each. Closing again does nothing.
        """
        first = not self._closing.is_set()
        self._closing.set()
        with self._changed:
            self._changed.notify()
        self._thread.join(timeout)
        if not first:
            return
        wrong = [f"{report.folder.name}: {report.cause}" for report in self.reports if report.outcome == "failed"]
        if self._thread.is_alive():
            wrong.append(f"not done after {timeout} s")
        if wrong:
            raise CheckpointError(f"{self._dest_root}: second tier is incomplete: {'; '.join(wrong)}")

    def __enter__(self) -> SecondTier:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting is not None or self._closing.is_set())
                folder, self._waiting = self._waiting, None
            if folder is None:
                return
            report = self._copy_with_retries(folder)
            with self._changed:
                self._reports.append(report)

    def _copy_with_retries(self, folder: Path) -> TierReport:
        cause = ""
        for attempt in range(1, self._retries + 2):
            try:
                copy_checkpoint(folder, self._dest_root)
            except Exception as error:  # this thread has no caller: whatever it is goes into the report
                cause = str(error)
                self._closing.wait(self._pause if attempt <= self._retries else 0)
            else:
                return TierReport(folder, "copied", attempt)
        return TierReport(folder, "failed", self._retries + 1, cause)
