"""Who is graded: from the paths of a command line to submissions, each with a name of its own; and what all of them came to.

Owns telling a folder of submissions from one submission, and the table and statistics of a cohort. Nothing is opened here but folders
and, where it holds several submissions, an archive.
"""

from __future__ import annotations

import csv
import glob
import io
import itertools
import os
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minigpt_dist.grading.archive import ArchiveError, extract
from minigpt_dist.grading.submission import is_spec, only_folder
from minigpt_dist.verify.entries import ENTRIES

MAX_ENTRANTS = 2000
IGNORED = ("__pycache__", "__MACOSX")
COHORT_FILES = CSV, INDEX, STATISTICS = ("grades.csv", "index.html", "statistics.json")
# What people hand in: the first two can be graded, the rest get a line that says so, instead of silence.
HANDED_IN = (".py", ".zip", ".ipynb", ".txt", ".pyc", ".pdf", ".tar", ".gz", ".tgz", ".7z", ".rar")


@dataclass(frozen=True)
class Entrant:
    """A submission to be: a name that is a safe and unique name of a folder, and the path to open."""

    name: str
    path: str


def entrants(paths: Sequence[str], scratch: Path, *, single: bool = False) -> list[Entrant]:
    """Everyone that `paths` stand for: files, folders, zips, globs, specs. An archive of many is taken apart under `scratch`.
    single: each path is one submission, whatever lies in it.

    Raises FileNotFoundError for a path that is not there, ValueError for a folder of too many.
    """
    found: list[str] = []
    for path in paths:
        if single and not (is_spec(path) or Path(path).exists()):
            raise FileNotFoundError(path)
        found += [path] if single else _meant(path, scratch)
    if len(found) > MAX_ENTRANTS:
        raise ValueError(f"there are {len(found)} submissions, but should be at most {MAX_ENTRANTS} at a time")
    taken = {name.casefold() for name in COHORT_FILES}
    return [Entrant(_unused(_safe(path), taken), path) for path in found]


def _unused(stem: str, taken: set[str]) -> str:
    """`stem`, or that with the first number that makes it a name of its own; it is taken then, in any case of its letters."""
    names = (stem if n == 1 else f"{stem}.{n}" for n in itertools.count(1))
    name = next(n for n in names if n.casefold() not in taken)
    taken.add(name.casefold())
    return name


def _safe(path: str) -> str:
    stem = path if is_spec(path) else os.path.basename(os.path.abspath(path)).removesuffix(".py").removesuffix(".zip")
    return re.sub(r"[^\w.-]+", "_", stem, flags=re.ASCII).lstrip(".")[:80] or "submission"


def _meant(path: str, scratch: Path) -> list[str]:
    """The submissions that one word of the command line stands for."""
    if is_spec(path):
        return [path]
    if not Path(path).exists() and glob.has_magic(path):
        matches = sorted(glob.glob(path, recursive=True))
        if matches:
            return matches
    if not Path(path).exists():
        raise FileNotFoundError(path)
    if Path(path).is_dir():
        return _within(Path(path)) or [path]
    if path.lower().endswith(".zip"):
        return _zipped(path, scratch)
    return [path]


def _within(folder: Path) -> list[str]:
    """The submissions in a folder; none if it is one itself, by an entry's name or because it holds one .py file, or is empty."""
    try:
        inside = [p for p in sorted(folder.iterdir()) if not p.name.startswith(".") and p.name not in IGNORED]
    except OSError:
        return []
    handed_in = [p for p in inside if p.is_dir() or p.suffix.lower() in HANDED_IN]
    single = len(handed_in) == 1 and handed_in[0].suffix == ".py"
    if single or any((folder / name).is_file() for name in ENTRIES):
        return []
    return [str(p) for p in handed_in]


def _zipped(path: str, scratch: Path) -> list[str]:
    """The submissions in an archive: itself, unless it holds several and is none."""
    target = scratch / f"archive-{len(list(scratch.iterdir()))}"
    target.mkdir()
    try:
        folder = only_folder(extract(Path(path), target))
    except (ArchiveError, OSError):
        return [path]  # a bad submission, which says so itself
    inside = _within(folder)
    return inside if len(inside) > 1 else [path]


def table(reports: Iterable[dict[str, Any]], ids: Sequence[str]) -> str:
    """CSV: a line a submission, a column an item. An item that was not asked is empty, and so is a score that there is not."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["submission", "verdict", "score", "max_score", "percent", *ids, "message"])
    for report in reports:
        rows = {row["id"]: row for row in report["items"]}
        points = [f"{rows[i]['points']:g}" if i in rows and rows[i]["outcome"] != "excused" else "" for i in ids]
        score, most = report["score"], report["max_score"]
        percent = f"{100 * score / most:.1f}" if score is not None and most else ""
        about = [report["submission"]["name"], report["verdict"], "" if score is None else f"{score:g}", f"{most:g}"]
        writer.writerow([_cell(value) for value in (*about, percent, *points, report["message"])])
    return text.getvalue()


def _cell(value: str) -> str:
    """A value that no spreadsheet takes for a formula."""
    return (
        f"'{value}"
        if value[:1] in ("=", "+", "@", "\t", "\r") or (value[:1] == "-" and not value[1:2].isdigit())
        else value
    )


def item_statistics(reports: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each item: how many were asked, earned all, some or nothing, and the mean part earned."""
    found: dict[str, list[dict[str, Any]]] = {}
    for report in reports:
        for row in report["items"]:
            asked = found.setdefault(row["id"], [])
            if row["outcome"] not in ("excused", "not_run"):
                asked.append(row)
    return [_statistic(id, rows) for id, rows in found.items()]


def _statistic(id: str, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    parts = [
        row["points"] / row["max_points"] if row["max_points"] else float(row["outcome"] == "passed") for row in rows
    ]
    counts = Counter("full" if p >= 1 else "none" if p <= 0 else "some" for p in parts)
    mean = round(statistics.fmean(parts), 4) if parts else None
    return {"id": id, "asked": len(rows), **{k: counts[k] for k in ("full", "some", "none")}, "mean": mean}
