"""A fifth host for faults: correct pipeline schedules, a list of (kind, stage, micro-batch) a rank.

It shares no code with `parallel/pipeline`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Action = tuple[str, int, int]
Row = Callable[[int, int, int], list[Action]]  # rank, ranks, micro-batches


def ahead(rank: int, micros: int, warm_up: int) -> list[Action]:
    """`warm_up` forwards, then forward and backward in turns, then the backwards that are left."""
    warm_up = min(max(warm_up, 0), micros)
    row: list[Action] = [("F", rank, m) for m in range(warm_up)]
    for m in range(warm_up, micros):
        row += [("F", rank, m), ("B", rank, m - warm_up)]
    return row + [("B", rank, m) for m in range(micros - warm_up, micros)]


def gpipe_row(rank: int, ranks: int, micros: int) -> list[Action]:
    return ahead(rank, micros, micros)


def one_f_one_b_row(rank: int, ranks: int, micros: int) -> list[Action]:
    return ahead(rank, micros, ranks - rank - 1)


def interleaved(ranks: int, micros: int, chunks: int) -> list[list[Action]]:
    """Micro-batches in groups of `ranks`, each through all chunks before the next."""
    rows = []
    for rank in range(ranks):
        order = [(c, g * ranks + i) for g in range(micros // ranks) for c in range(chunks) for i in range(ranks)]
        forwards: list[Action] = [("F", c * ranks + rank, m) for c, m in order]
        backwards: list[Action] = [("B", (chunks - 1 - c) * ranks + rank, m) for c, m in order]
        warm_up = min(2 * (ranks - rank - 1) + (chunks - 1) * ranks, len(forwards))
        row = forwards[:warm_up]
        for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
            row += [forward, backward]
        rows.append(row + backwards[len(forwards) - warm_up :])
    return rows


def schedules(
    one_f_one_b: Row = one_f_one_b_row,
    gpipe: Row = gpipe_row,
    chunked: Callable[[int, int, int], list[list[Action]]] = interleaved,
) -> dict[str, Any]:
    """The correct base, with the list of one rank, or of all in chunks, replaced."""
    rows = {"1f1b": one_f_one_b, "gpipe": gpipe}

    def pipeline_schedule(kind: str, ranks: int, micros: int, chunks: int = 1) -> list[list[Action]]:
        if ranks < 1 or micros < 1 or kind not in (*rows, "interleaved"):
            raise ValueError(f"{kind} of {ranks} ranks and {micros} micro-batches")
        if kind == "interleaved":
            return chunked(ranks, micros, chunks)
        return [rows[kind](rank, ranks, micros) for rank in range(ranks)]

    return {"pipeline_schedule": pipeline_schedule}


NAMES = schedules()
