"""A report as the result that GitHub Classroom's autograding reporter reads."""

from __future__ import annotations

from typing import Any

VERSION = 1
STATUS = {"pass": "pass", "fail": "fail", "ungradable": "error", "infrastructure": "error"}


def render(report: dict[str, Any]) -> dict[str, Any]:
    """One test an item that was asked, with fractions of points; the text of a test is never in it."""
    return {
        "version": VERSION,
        "status": STATUS[report["verdict"]],
        "max_score": report["max_score"],
        "tests": [_test(row) for row in report["items"] if row["outcome"] != "excused"],
    }


def _test(row: dict[str, Any]) -> dict[str, Any]:
    status = "pass" if row["outcome"] == "passed" else "error" if row["outcome"] in ("not_run", "crashed") else "fail"
    return {
        "name": f"{row['number']} {row['title']}",
        "status": status,
        "score": row["points"],
        "message": row["message"] if row["visibility"] == "visible" and row["message"] else None,
        "test_code": "",
        "filename": "",
        "line_no": 0,
        "duration": row["duration_s"],
    }
