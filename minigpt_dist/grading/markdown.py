"""A report as Markdown, also as the summary of a GitHub step."""

from __future__ import annotations

import os
from typing import Any

from minigpt_dist.grading.report import summary

MAX_BYTES = 900_000  # of a step's summary: GitHub drops one of more than 1,024 KiB whole
MARKS = {"passed": "✅", "partial": "🟡", "skipped": "⏭", "excused": "-", "not_run": "…"}


def render(report: dict[str, Any]) -> str:
    """A table of the items, then, for each that lost points, where it first went wrong and a hint. Hidden items stay hidden."""
    about, made = report["submission"], report["environment"]
    lines = [
        f"# {_plain(about['name'])}: {_plain(summary(report))}",
        "",
        f"minigpt-dist {report['suite']['version']}, torch {made['torch']}, isolation {made['isolation']}, "
        f"seed {made.get('seed', 'kept secret')} ({made['seed_commitment'][:23]}…)",
        "",
        "| | item | points | of |",
        "|---|---|--:|--:|",
    ]
    for row in report["items"]:
        most = f"{row['max_points']:g}" if row["outcome"] != "excused" else "-"
        if row["visibility"] == "visible":
            mark = MARKS.get(row["outcome"], "❌")
            lines.append(f"| {mark} | {row['number']} {_plain(row['title'])} | {row['points']:g} | {most} |")
        else:
            lines.append(f"| | {row['number']} not shown ({row['visibility']}) | | |")
    for row in report["items"]:
        if row["message"] and row["outcome"] not in ("passed", "excused") and row["visibility"] == "visible":
            lines += _detail(row)
    return capped("\n".join(lines) + "\n")


def _detail(row: dict[str, Any]) -> list[str]:
    lines = ["", f"## {row['number']} {_plain(row['title'])}: {row['outcome']}", "", *_fenced(row["message"])]
    if row["hint"]:
        lines += ["", f"Hint: {_plain(row['hint'])} (lesson {_plain(row['lesson'])})"]
    return [*lines, "", *_fenced(row["reproduce"])]


def _fenced(text: str) -> list[str]:
    """Words that a submission may have chosen, as a block that they cannot end: their lines begin with four spaces."""
    return [f"    {line}" for line in text.splitlines()]


def _plain(text: str) -> str:
    """Text without anything that Markdown or HTML would obey."""
    return "".join(f"\\{c}" if c in "\\`*_[]#|" else {"<": "&lt;", ">": "&gt;", "&": "&amp;"}.get(c, c) for c in text)


def capped(text: str) -> str:
    """At most `MAX_BYTES`, cut at a line."""
    raw = text.encode()
    if len(raw) <= MAX_BYTES:
        return text
    note = "\n(the rest is left out: see grade.json)\n"
    return raw[: MAX_BYTES - len(note)].decode(errors="ignore").rpartition("\n")[0] + note


def append_step_summary(text: str) -> None:
    """Add to the summary of the GitHub step that this process is, if it is one, as long as there is room."""
    path = os.environ.get("GITHUB_STEP_SUMMARY")
    if path:
        with open(path, "a", encoding="utf-8") as file:
            if file.tell() + len(text.encode()) <= MAX_BYTES:
                file.write(text)
