"""What an instructor is shown of a cohort, as plain data for the template.

Owns the statistics: a row a submission, a row an item, and the mistakes that most submissions share. Hidden items are counted here:
this page is not for students.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from minigpt_dist.grading.outputs import PAGE
from minigpt_dist.grading.page.text import NONE, number, percent, plain, words
from minigpt_dist.grading.page.view import WRONG, name_of

MOST_MISTAKES = 12
MOST_NAMED = 8


@dataclass(frozen=True)
class Cell:
    """Points of one submission in one group of items."""

    points: str
    share: int


@dataclass(frozen=True)
class Line:
    """One submission of the cohort."""

    name: str
    link: str
    verdict: str
    score: str
    share: int
    cells: tuple[Cell, ...]


@dataclass
class Statistic:
    """One item over all submissions that were asked it: who earned it whole, and the mean."""

    number: str
    title: str
    group: str
    max_points: float
    asked: int = 0
    whole: int = 0
    sum: float = 0.0

    @property
    def share(self) -> int:
        return percent(self.whole, self.asked)

    @property
    def mean(self) -> str:
        return number(self.sum / self.asked) if self.asked else NONE

    @property
    def most(self) -> str:
        return number(self.max_points)


@dataclass
class Mistake:
    """One hint given for one item, and to whom."""

    title: str
    hint: str
    example: str
    names: list[tuple[str, str]] = field(default_factory=list)

    @property
    def named(self) -> list[tuple[str, str]]:
        return self.names[:MOST_NAMED]

    @property
    def unnamed(self) -> int:
        return max(0, len(self.names) - MOST_NAMED)


def cohort_view(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The variables of the cohort's template."""
    groups = list(dict.fromkeys(str(item["group"]) for report in reports for item in report["items"]))
    scores = [float(r["score"]) for r in reports if isinstance(r.get("score"), (int, float))]
    full = sum(1 for r in reports if r["verdict"] == "pass")
    return {
        "count": len(reports),
        "groups": [{"name": words(g), "most": number(_most(reports, g))} for g in groups],
        "lines": [_line(report, groups) for report in reports],
        "statistics": statistics(reports),
        "mistakes": mistakes(reports),
        "mean": number(sum(scores) / len(scores)) if scores else NONE,
        "median": number(_median(scores)) if scores else NONE,
        "full": full,
        "broken": sum(1 for r in reports if r["verdict"] in ("ungradable", "infrastructure")),
        "max_score": number(max((r["max_score"] for r in reports), default=0)),
    }


def link_of(report: Mapping[str, Any]) -> str:
    """The address of a submission's own page, from the folder of all; none for a name that is no folder's."""
    name = str(report["submission"].get("name") or "")
    return f"{quote(name)}/{PAGE}" if name and name not in (".", "..") and "/" not in name else ""


def _most(reports: Iterable[Mapping[str, Any]], group: str) -> float:
    """The most points that a submission of the cohort could earn in `group`."""
    sums = [sum(item["max_points"] for item in r["items"] if str(item["group"]) == group) for r in reports]
    return max(sums, default=0.0)


def _median(values: Iterable[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def _line(report: Mapping[str, Any], groups: Sequence[str]) -> Line:
    """A row of the first table: the score, and points by group."""
    score, maximum = report.get("score"), report["max_score"]
    cells = []
    for group in groups:
        items = [item for item in report["items"] if str(item["group"]) == group]
        earned, possible = (sum(item[key] for item in items) for key in ("points", "max_points"))
        cells.append(Cell(number(earned) if possible else NONE, percent(earned, possible) if possible else 100))
    verdict = plain(report["verdict"], 40)
    return Line(name_of(report), link_of(report), verdict, number(score), percent(score or 0, maximum), tuple(cells))


def statistics(reports: Sequence[Mapping[str, Any]]) -> list[Statistic]:
    """Each item once, in the order of the rubric."""
    found: dict[str, Statistic] = {}
    for report in reports:
        for item in report["items"]:
            statistic = found.setdefault(
                str(item["id"]),
                Statistic(
                    plain(item.get("number") or "", 20),
                    plain(item["title"], 200),
                    words(str(item["group"])),
                    item["max_points"],
                ),
            )
            statistic.max_points = max(statistic.max_points, item["max_points"])
            if item["outcome"] in ("excused", "not_run"):
                continue
            statistic.asked += 1
            statistic.whole += item["outcome"] == "passed"
            statistic.sum += item["points"]
    return list(found.values())


def mistakes(reports: Iterable[Mapping[str, Any]]) -> list[Mistake]:
    """What went wrong most often: (item, hint) pairs by the number of submissions, the most frequent first."""
    found: dict[tuple[str, str], Mistake] = {}
    for report in reports:
        for item in report["items"]:
            if item["outcome"] in WRONG:
                hint = plain((item.get("evidence") or {}).get("hint") or item.get("hint") or "", 300)
                key = (str(item["id"]), hint)
                mistake = found.setdefault(
                    key, Mistake(plain(item["title"], 200), hint, plain(item.get("message") or "", 400))
                )
                mistake.names.append((name_of(report), link_of(report)))
    ranked = sorted(found.values(), key=lambda m: -len(m.names))
    return ranked[:MOST_MISTAKES]
