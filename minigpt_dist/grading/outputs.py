"""The files of one graded submission, in every format, all from its report.

Owns their names and when they are written. Leaves each format to its module.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from minigpt_dist.grading import classroom, gradescope, junit, markdown
from minigpt_dist.grading.report import to_json, write

REPORT = "grade.json"
PAGE = "grade.html"


def write_running(folder: Path, report: dict[str, Any]) -> None:
    """What must be true at every moment: the report, and Gradescope's file."""
    write(folder / REPORT, to_json(report))
    write(folder / "results.json", to_json(gradescope.render(report)))


def write_all(folder: Path, report: dict[str, Any]) -> str:
    """Every format; returns why there is no page, or ""."""
    write_running(folder, report)
    write(folder / "junit.xml", junit.render(report))
    write(folder / "classroom.json", to_json(classroom.render(report)))
    write(folder / "grade.md", markdown.render(report))
    return write_page(folder / PAGE, "render", report)


def write_page(path: Path, name: str, *args: Any, **options: Any) -> str:
    """Write what a function of the page module returns; the reason if there can be no page, or ""."""
    try:
        write(path, getattr(importlib.import_module("minigpt_dist.grading.page"), name)(*args, **options))
    except ImportError:
        return "no HTML page: it needs jinja2, pip install 'minigpt-dist[grading]'"
    except Exception as error:  # a page is a way to look at a grade, and must not cost one
        return f"no HTML page: {type(error).__name__}: {error}"
    return ""
