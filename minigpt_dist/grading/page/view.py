"""What a student is shown of a report, as plain data for the template.

Owns the choice: hidden items without any detail, the first thing that went wrong, the evidence in reading order, what was not
checked and why. Leaves wording of single verdicts to the report.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from minigpt_dist.grading.page.text import NONE, number, pairs, percent, plain, words

# Each outcome as a sign and a word, so that colour is never the only difference.
OUTCOMES = {
    "passed": ("✓", "passed"),
    "partial": ("◐", "in part"),
    "failed": ("✗", "failed"),
    "timeout": ("✗", "timed out"),
    "crashed": ("✗", "crashed"),
    "skipped": ("→", "skipped"),
    "excused": (NONE, "left out"),
    "not_run": ("…", "not run"),
}
WRONG = ("failed", "partial", "timeout", "crashed")
COMPOSED = ("invariants", "traffic")  # groups of the suite's rubric whose items run all pieces together
NOT_CHECKED = ("skipped", "excused", "not_run")
VERDICTS = {
    "pass": "All that could be checked is right.",
    "fail": "Some points were lost.",
    "ungradable": "This submission could not be graded: its pieces could not be loaded.",
    "infrastructure": "The grader itself failed. This says nothing about the submission, and no score was given.",
}
HIDDEN = {
    "hidden": "hidden",
    "after_due_date": "shown after the due date",
    "after_published": "shown when grades are published",
}
LONGEST_NAME = 60
EVIDENCE = {
    "world_size": "world size",
    "step": "step",
    "rank": "rank",
    "stage": "part of the step",
    "tensor": "tensor",
    "element": "element",
    "observed": "seen",
    "observed_hex": "seen, as bits",
    "expected": "expected",
    "expected_hex": "expected, as bits",
    "check": "check",
}
NOT_EVIDENCE = ("hint", "what")  # the one is shown as a hint, the other is part of the message
SUBMISSION = {
    "path": "handed in",
    "entry": "file graded",
    "shape": "shape",
    "pieces": "pieces found",
    "sha256": "sha256",
}
SUITE = {"version": "suite", "rubric": "rubric", "rubric_sha256": "sha256 of the rubric"}
NOTICES = {
    "stood_in": "not installed or not needed here, replaced by a stand-in that does nothing",
    "borrowed": "work of others",
}
ENVIRONMENT = {
    "isolation": "isolation in force",
    "isolation_notes": "what it gives",
    "seed_commitment": "commitment to the seed",
    "seed": "seed",
    "python": "Python",
    "torch": "PyTorch",
    "platform": "system",
    "cpus": "processors",
}


@dataclass(frozen=True)
class Row:
    """One item of the rubric, as it is shown. `evidence` is (name, value) in reading order."""

    anchor: str
    number: str
    title: str
    sign: str
    outcome: str
    kind: str
    points: str
    max_points: str
    message: str = ""
    hint: str = ""
    advice: str = ""
    lesson: str = ""
    reproduce: str = ""
    evidence: tuple[tuple[str, str], ...] = ()

    @property
    def score(self) -> str:
        """Points of the most there are; a dash for an item that only others depend on."""
        return NONE if self.max_points == "0" else f"{self.points} / {self.max_points}"

    @property
    def wrong(self) -> bool:
        return self.kind in WRONG


@dataclass
class Group:
    """Items of one group, and its points; those of hidden items are left out."""

    name: str
    rows: list[Row] = field(default_factory=list)
    earned: float = 0.0
    possible: float = 0.0
    hidden: int = 0

    @property
    def share(self) -> int:
        return percent(self.earned, self.possible)

    @property
    def score(self) -> str:
        return f"{number(self.earned)} / {number(self.possible)}"


def submission_view(report: Mapping[str, Any]) -> dict[str, Any]:
    """The variables of the submission's template, from a report of schema minigpt-dist-grade/1."""
    items = list(report["items"])
    groups = list(grouped(items).values())
    rows = [row for group in groups for row in group.rows]
    score, maximum = report.get("score"), report["max_score"]
    verdict = plain(report["verdict"], 40)
    return {
        "name": name_of(report),
        "verdict": VERDICTS.get(verdict, verdict),
        "message": plain(report.get("message") or "") if verdict in ("ungradable", "infrastructure") else "",
        "score": number(score),
        "max_score": number(maximum),
        "share": percent(score or 0, maximum),
        "groups": groups,
        "hidden": sum(group.hidden for group in groups),
        "first": first_to_mend(groups),
        "wrong": sum(row.wrong for row in rows),
        "passed": sum(row.kind == "passed" for row in rows),
        "notices": notices(report),
        "unchecked": sum(row.kind in NOT_CHECKED for row in rows),
        "reasons": reasons(rows),
        "submission": pairs(report["submission"], SUBMISSION, ("name", *NOTICES)),
        "environment": pairs(report["environment"], ENVIRONMENT),
        "suite": pairs(report["suite"], SUITE, ("rubric_total",)),
    }


def reasons(rows: Iterable[Row]) -> list[tuple[Row, list[Row]]]:
    """What was not checked, wholly or in part, by its reason: (a row that has it, every row that has it)."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row.kind in NOT_CHECKED or (row.kind == "passed" and row.message):
            found.setdefault((row.kind, row.message), []).append(row)
    return [(same[0], same) for same in found.values()]


def first_to_mend(groups: Iterable[Group]) -> Row | None:
    """The first item that went wrong, a piece before the whole composition: that mostly fails because a piece does."""
    wrong = [(group.name in COMPOSED, row) for group in groups for row in group.rows if row.wrong]
    return min(wrong, key=lambda pair: pair[0])[1] if wrong else None


def grouped(items: Iterable[Mapping[str, Any]]) -> dict[str, Group]:
    """Groups by name, in the order of the report."""
    groups: dict[str, Group] = {}
    for item in items:
        group = groups.setdefault(str(item["group"]), Group(words(str(item["group"]))))
        if item.get("visibility", "visible") == "visible":
            group.earned += item["points"]
            group.possible += item["max_points"]
            group.rows.append(_row(item))
        else:
            group.hidden += 1
            group.rows.append(_hidden_row(item))
    return groups


def _row(item: Mapping[str, Any]) -> Row:
    kind = str(item["outcome"])
    sign, outcome = OUTCOMES.get(kind, ("?", plain(kind, 40)))
    evidence = item.get("evidence") or {}
    own_hint = evidence.get("hint") or ""
    wrong = kind in WRONG
    return Row(
        anchor=f"item-{plain(item['id'], 80)}",
        number=plain(item.get("number") or "", 20),
        title=plain(item["title"], 200),
        sign=sign,
        outcome=outcome,
        kind=kind if kind in OUTCOMES else "unknown",
        points=number(item["points"]),
        max_points=number(item["max_points"]),
        message=without(outcome, plain(item.get("message") or "")),
        hint=plain(own_hint or item.get("hint") or "", 500) if wrong else "",
        advice=plain(item.get("hint") or "", 500) if wrong and own_hint else "",
        lesson=plain(item.get("lesson") or "", 120) if wrong else "",
        reproduce=plain(item.get("reproduce") or "", 500) if wrong else "",
        evidence=pairs(evidence, EVIDENCE, NOT_EVIDENCE) if wrong else (),
    )


def without(outcome: str, message: str) -> str:
    """`message` without the outcome in front, which stands beside it already."""
    return message.removeprefix(f"{outcome}: ")


def _hidden_row(item: Mapping[str, Any]) -> Row:
    """An item that is not shown: that it exists and what it is worth, nothing of what came out."""
    why = HIDDEN.get(str(item["visibility"]), "hidden")
    return Row(
        "",
        plain(item.get("number") or "", 20),
        "A check that is not shown",
        NONE,
        why,
        "hidden",
        NONE,
        number(item["max_points"]),
    )


def notices(report: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """What a student must know of how it was graded: packages stood in for, work of others in place of their own."""
    found = report["submission"]
    return pairs(found, NOTICES, [key for key in found if key not in NOTICES])


def name_of(report: Mapping[str, Any]) -> str:
    """The submission's name, or the last part of its path."""
    path = plain(report["submission"].get("name") or report["submission"].get("path") or "submission", 300)
    name = path.rstrip("/").rpartition("/")[2] or path
    return name if len(name) <= LONGEST_NAME else name[: LONGEST_NAME - 1] + "…"
