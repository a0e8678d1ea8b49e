"""Reading a run's metrics: the finished trace, or the live files of a run that is still going or was killed."""

from __future__ import annotations

import json
from pathlib import Path

from minigpt_dist.trace import Record, Trace, read_trace


def read_run(folder: Path) -> Trace:
    """The trace in `folder`: trace.jsonl, else the metrics-rank*.jsonl that ranks append to, up to the last step that all have reached.

    A killed rank may leave half a line at the end of its file, and only there: it is not a record yet.
    ValueError for a folder without metrics, or a broken line elsewhere.
    """
    finished, live = folder / "trace.jsonl", sorted(folder.glob("metrics-rank*.jsonl"))
    if finished.is_file():
        return read_trace(finished)
    if not live:
        raise ValueError(f"{folder} holds neither trace.jsonl nor metrics-rank*.jsonl, but should be a run's folder")
    ranks = [_records(path) for path in live]
    reached = min(records[-1].step if records else -1 for records in ranks)
    if reached < 0:
        raise ValueError(f"{folder} holds no complete record yet, but should hold one of every rank")
    return Trace({}, [record for records in ranks for record in records if record.step <= reached])


def _records(path: Path) -> list[Record]:
    *lines, rest = path.read_text(encoding="utf-8").split("\n")  # what follows the last newline is not whole
    del rest
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(Record(**json.loads(line)))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path} line {number} is {line[:60]!r}, but should be one trace record") from error
    return records
