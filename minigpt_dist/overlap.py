"""The overlap of communication with computation in one step, as its records tell it: who computes when, and what is under way meanwhile.

Owns the arithmetic of intervals and the chart. Leaves the clock of calls to `launch/in_flight.py`, that of computing to `recorder.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from minigpt_dist.trace import Record

Interval = tuple[float, float]


@dataclass(frozen=True)
class Overlap:
    """Seconds of one rank's step.

    under_way: while at least one exchange was. waited: of these, while the rank did nothing but wait for one. hidden: the rest, in which
    it computed. length: of the step, from the first start to the last end.
    """

    under_way: float
    waited: float
    length: float
    calls: int

    @property
    def hidden(self) -> float:
        return self.under_way - self.waited


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The union, as disjoint intervals in order."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


def length(intervals: Iterable[Interval]) -> float:
    """Of the union."""
    return sum(end - start for start, end in merged(intervals))


def common(some: Iterable[Interval], others: Iterable[Interval]) -> list[Interval]:
    """What two unions share."""
    pairs = [(max(a, c), min(b, d)) for a, b in merged(some) for c, d in merged(others)]
    return [(start, end) for start, end in pairs if start < end]


def exchanges(record: Record) -> list[Interval]:
    """When each timed exchange was under way."""
    return [(call["start"], call["end"]) for call in record.collectives if "end" in call]


def waits(record: Record) -> list[Interval]:
    """When the rank was in an exchange, or waited for one."""
    return [(start, end) for call in record.collectives for start, end in call.get("waits", [])]


def overlap_of(record: Record) -> Overlap:
    """Of a record with a timeline; ValueError for one without."""
    if not record.spans:
        raise ValueError(f"step {record.step} of rank {record.rank} has no timeline, but should have one")
    moments = [(start, end) for _, start, end in record.spans] + exchanges(record)
    whole = max(end for _, end in moments) - min(start for start, _ in moments)
    busy = exchanges(record)
    return Overlap(length(busy), length(common(busy, waits(record))), whole, len(busy))


def chart(records: Sequence[Record], width: int = 100) -> str:
    """Three lines a rank: computing (F forward, B backward, U update), exchanges under way (=), waiting for one (w). One clock for all."""
    moments = [m for r in records for m in ([(start, end) for _, start, end in r.spans] + exchanges(r))]
    first = min(start for start, _ in moments)
    scale = width / (max(end for _, end in moments) - first)

    def line(marks: Iterable[tuple[str, Interval]]) -> str:
        row = ["."] * width
        for mark, (start, end) in marks:
            left = min(round((start - first) * scale), width - 1)
            right = max(round((end - first) * scale), left + 1)
            row[left:right] = mark * (right - left)
        return "".join(row[:width])

    lines = []
    for r in records:
        computing = line((what[0], (start, end)) for what, start, end in r.spans)
        lines += [
            f"rank {r.rank} computes  |{computing}|",
            f"{'':6} under way |{line(('=', each) for each in exchanges(r))}|",
            f"{'':6} waits     |{line(('w', each) for each in waits(r))}|",
        ]
    return "\n".join(lines)
