"""What identifies a file's bytes: sha256 over all of them, and crc32 over a fixed sample for the fast check.

A crc32 of every byte would cost the save a fifth again of what sha256 costs, for less certainty. The sample makes
the fast check cheap on both sides: files up to `SAMPLE_BYTES` are covered whole, longer ones in `SAMPLE_BLOCKS` even
blocks that include the first and the last byte. Damage between the blocks is left to sha256, which every load checks.

Owns the two checksums and which bytes the sample takes. Leaves reading and writing to `shard_file`.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator

__all__ = ["FileDigest", "sample_ranges"]

SAMPLE_BYTES = 4 << 20
SAMPLE_BLOCKS = 64


def sample_ranges(nbytes: int) -> list[tuple[int, int]]:
    """The half-open byte ranges, in order and without overlap, that the crc32 of an `nbytes` long file covers."""
    if nbytes <= SAMPLE_BYTES:
        return [(0, nbytes)]
    block = SAMPLE_BYTES // SAMPLE_BLOCKS
    starts = [i * (nbytes - block) // (SAMPLE_BLOCKS - 1) for i in range(SAMPLE_BLOCKS)]
    return [(start, start + block) for start in starts]


class FileDigest:
    """Both checksums of a file of `nbytes`, fed piece by piece in file order."""

    def __init__(self, nbytes: int) -> None:
        self._sha256 = hashlib.sha256()
        self._crc32 = 0
        self._sample = sample_ranges(nbytes)
        self.position = 0

    def update(self, piece: memoryview) -> None:
        """Takes in the next bytes of the file; a one-dimensional view of bytes."""
        self._sha256.update(piece)
        for start, stop in self._sampled_in(len(piece)):
            self._crc32 = zlib.crc32(piece[start:stop], self._crc32)
        self.position += len(piece)

    def _sampled_in(self, length: int) -> Iterator[tuple[int, int]]:
        here, end = self.position, self.position + length
        for start, stop in self._sample:
            if start < end and stop > here:
                yield max(start, here) - here, min(stop, end) - here

    @property
    def sha256(self) -> str:
        """64 hexadecimal digits, over every byte."""
        return self._sha256.hexdigest()

    @property
    def crc32(self) -> str:
        """8 hexadecimal digits, over the sampled bytes."""
        return f"{self._crc32:08x}"
