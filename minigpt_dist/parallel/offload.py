"""Optimizer state out of the way: master copy and moments in a file or in the host's memory, updated a chunk at a time.

Owns where the three vectors live, and AdamW on them with reading, computing and writing at the same time. Leaves sharding to `stages/`.
As ZeRO-Infinity (Rajbhandari et al. 2021, "ZeRO-Infinity: breaking the GPU memory wall for extreme scale deep learning", section 5).

The file has no name from the moment it is made, so that nothing of it is left whatever becomes of the process; what a run goes on from
is its checkpoint. Of a mapped file, only the pages of the chunks under way are resident: each is dropped when its chunk is done.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minigpt_dist.parallel.adam import adamw_
from minigpt_dist.require import require, require_count, require_one_of

WHERE = ("memory", "disk")
VECTORS = 3  # master, exp_avg, exp_avg_sq
Chunk = list[Tensor]  # as much of each
CHUNKS_ALIVE = 3  # one being read, one computed, one written


@dataclass(frozen=True)
class Offload:
    """Where the state goes: "disk", into a file in `folder`, or "memory", the host's (pinned where CUDA is).

    chunk: elements of each vector that are worked on at once. ValueError for another place, or for a disk without a folder.
    """

    where: str
    folder: Path | None = None
    chunk: int = 2**20

    def __post_init__(self) -> None:
        require_one_of("offload", self.where, WHERE)
        require_count("chunk", self.chunk)
        require(self.where != "disk" or self.folder is not None, "folder", self.folder, "a folder for the file")


class ResidentState:
    """Three vectors in `master`'s own memory: `master` itself and two of zeros."""

    def __init__(self, master: Tensor) -> None:
        self.master, self.exp_avg, self.exp_avg_sq = master, torch.zeros_like(master), torch.zeros_like(master)

    def pieces(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """One piece, or none."""
        if start < stop:
            yield start, stop

    def adamw_(self, start: int, stop: int, grad: Tensor, step: int, **options: Any) -> None:
        """`adam.adamw_` on elements [start, stop), whose gradient is `grad`."""
        master, exp_avg, exp_avg_sq = (t[start:stop] for t in (self.master, self.exp_avg, self.exp_avg_sq))
        adamw_(master, exp_avg, exp_avg_sq, grad, step, **options)

    def copy(self, name: str, numel: int) -> Tensor:
        """The first `numel` elements of a vector, in memory of their own."""
        vector: Tensor = getattr(self, name)
        return vector[:numel].clone()


class OffloadedState:
    """Three vectors of `master`'s length and dtype, the first a copy of it, the others zero.

    master, exp_avg, exp_avg_sq: 1-D tensors on the CPU, to be read and written a piece at a time (`pieces`). OSError if the disk is full.
    """

    def __init__(self, master: Tensor, offload: Offload) -> None:
        self._chunk, self._numel = offload.chunk, master.numel()
        self._map: mmap.mmap | None = None
        if offload.where == "disk":
            self._stride = -(-max(master.nbytes, 1) // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
            self._map = _anonymous_map(offload.folder, VECTORS * self._stride)
            vectors = [self._mapped(i, master) for i in range(VECTORS)]
        else:
            pinned = torch.cuda.is_available()
            vectors = [torch.zeros(self._numel, dtype=master.dtype, pin_memory=pinned) for _ in range(VECTORS)]
        self.master, self.exp_avg, self.exp_avg_sq = vectors
        for lo, hi in self.pieces():
            self.master[lo:hi].copy_(master[lo:hi])

    def _mapped(self, i: int, like: Tensor) -> Tensor:
        """Vector i of the file. It is zero, as the file is new."""
        assert self._map is not None
        if not self._numel:
            return torch.zeros_like(like, device="cpu")
        return torch.frombuffer(self._map, dtype=like.dtype, count=self._numel, offset=i * self._stride)

    def pieces(self, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, int]]:
        """Cuts of elements [start, stop), a chunk at most; when the next is asked for, the last one's pages are dropped."""
        stop = self._numel if stop is None else stop
        for lo in range(start, stop, self._chunk):
            hi = min(lo + self._chunk, stop)
            yield lo, hi
            self._drop(lo, hi)

    def adamw_(self, start: int, stop: int, grad: Tensor, step: int, **options: Any) -> None:
        """`adam.adamw_` on elements [start, stop), whose gradient is `grad`, with the same bits.

        While a chunk is computed on `grad`'s device, the next one is read and the last one written.
        """
        cuts = [(lo, min(lo + self._chunk, stop)) for lo in range(start, stop, self._chunk)]
        spare = [self._new_chunk(min(self._chunk, stop - start), grad.device) for _ in range(CHUNKS_ALIVE)]
        with ThreadPoolExecutor(2, thread_name_prefix="minigpt-dist-offload") as pool:
            coming = pool.submit(self._read, *cuts[0], spare.pop())
            leaving: Future[Chunk] | None = None
            for number, (lo, hi) in enumerate(cuts):
                chunk = coming.result()
                if number + 1 < len(cuts):
                    coming = pool.submit(self._read, *cuts[number + 1], spare.pop())
                master, exp_avg, exp_avg_sq = (t[: hi - lo] for t in chunk)
                adamw_(master, exp_avg, exp_avg_sq, grad[lo - start : hi - start], step, **options)
                if leaving is not None:
                    spare.append(leaving.result())
                leaving = pool.submit(self._write, lo, hi, chunk)
            if leaving is not None:
                leaving.result()

    def copy(self, name: str, numel: int) -> Tensor:
        """The first `numel` elements of a vector, in memory of their own."""
        vector = getattr(self, name)
        out = torch.empty(numel, dtype=vector.dtype)
        for lo, hi in self.pieces(0, numel):
            out[lo:hi].copy_(vector[lo:hi])
        return out

    def _vectors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.master, self.exp_avg, self.exp_avg_sq

    def _new_chunk(self, numel: int, device: torch.device) -> Chunk:
        return [torch.empty(numel, dtype=v.dtype, device=device) for v in self._vectors()]

    def _read(self, lo: int, hi: int, chunk: Chunk) -> Chunk:
        for mine, vector in zip(chunk, self._vectors(), strict=True):
            mine[: hi - lo].copy_(vector[lo:hi])
        self._drop(lo, hi)
        return chunk

    def _write(self, lo: int, hi: int, chunk: Chunk) -> Chunk:
        for vector, mine in zip(self._vectors(), chunk, strict=True):
            vector[lo:hi].copy_(mine[: hi - lo])
        self._drop(lo, hi)
        return chunk

    def _drop(self, lo: int, hi: int) -> None:
        """Let go of the pages of elements [lo, hi); what was written to them stays in the file."""
        advice = getattr(mmap, "MADV_DONTNEED", None)  # not on every system: pages then stay until memory is short
        if self._map is None or advice is None:
            return
        size, page = self.master.element_size(), mmap.PAGESIZE
        for i in range(VECTORS):
            begin = (i * self._stride + lo * size) // page * page
            self._map.madvise(advice, begin, i * self._stride + hi * size - begin)


def _anonymous_map(folder: Path | None, nbytes: int) -> mmap.mmap:
    """A new file of zeros in `folder`, mapped, without a name.

    Its blocks are reserved, so that a full disk is an OSError here, and no signal later.
    """
    with tempfile.TemporaryFile(dir=folder) as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, nbytes)
        else:
            file.truncate(nbytes)
        return mmap.mmap(file.fileno(), nbytes)
