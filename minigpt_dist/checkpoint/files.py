"""One file, written so that it lasts and read so that it cannot mislead.

Owns the system calls on a single file or folder: new files only, every byte, fsync; regular files only, no links,
sizes known before reading. Leaves what the bytes mean, and the order of renames, to others.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from minigpt_dist.checkpoint.digest import FileDigest
from minigpt_dist.checkpoint.errors import mismatch, naming_file

__all__ = ["fsync_folder", "open_regular", "read_exactly", "read_small", "write_file"]

WRITEBACK_FROM_BYTES = 1 << 20  # starting the disk for less costs more than it wins


def write_file(path: Path, nbytes: int, pieces: Iterable[memoryview]) -> FileDigest:
    """Writes and fsyncs the `nbytes` of `pieces` to the new file `path`; the digest of what was written.

    Raises:
        CheckpointError: naming the file and the system's reason.
    """
    digest = FileDigest(nbytes)
    with naming_file(path, f"to write {nbytes} bytes"):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            for piece in pieces:
                _write_all(fd, piece)
                _start_writeback(fd, digest.position, len(piece))
                digest.update(piece)
            os.fsync(fd)
        finally:
            os.close(fd)
    return digest


@contextmanager
def open_regular(path: Path) -> Iterator[tuple[BinaryIO, int]]:
    """Opens the regular file `path` and gives its size in bytes with it; links are refused.

    Raises:
        CheckpointError: missing, not a regular file, or an `OSError` inside the block.
    """
    with naming_file(path, "a readable file"):
        # Without O_NONBLOCK, opening a fifo that was planted there would wait for ever.
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise mismatch(path, "a regular file", stat.filemode(status.st_mode))
            with open(fd, "rb", closefd=False) as file:
                yield file, status.st_size
        finally:
            os.close(fd)


def read_exactly(path: Path, nbytes: int) -> bytes:
    """The content of `path`, which must be `nbytes` long; CheckpointError, before reading, if it is not."""
    with open_regular(path) as (file, size):
        content = file.read(nbytes) if size == nbytes else b""
    if len(content) != nbytes or size != nbytes:
        raise mismatch(path, f"{nbytes} bytes", f"{size} bytes")
    return content


def read_small(path: Path, limit: int) -> str:
    """The content of the ASCII file `path`; CheckpointError if it is longer than `limit` bytes or not ASCII."""
    with open_regular(path) as (file, _):
        content = file.read(limit + 1)
    if len(content) > limit or not content.isascii():
        raise mismatch(path, f"at most {limit} bytes of ASCII", f"{content[:40]!r}...")
    return content.decode("ascii")


def fsync_folder(folder: Path) -> None:
    """Makes names added to and removed from `folder` durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _write_all(fd: int, piece: memoryview) -> None:
    while piece:
        piece = piece[os.write(fd, piece) :]


def _start_writeback(fd: int, start: int, length: int) -> None:
    """Lets the disk begin with a piece while the next is hashed, where the system can be told so.

    The advice is that the pages are not needed: Linux then starts writing them, and waits for nothing.
    """
    if length >= WRITEBACK_FROM_BYTES and hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, start, length, os.POSIX_FADV_DONTNEED)
