"""From a report to a page that needs nothing else: no script, no font, no network.

Owns the templates and how they are filled: everything is escaped, and the page's own policy forbids whatever might slip
through. Leaves what is shown of a report to `view.py` and `cohort_view.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2

from minigpt_dist.grading.page.cohort_view import cohort_view
from minigpt_dist.grading.page.view import submission_view

_ENVIRONMENT = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


def render(report: dict[str, Any]) -> str:
    """The page of one submission, from its report (schema minigpt-dist-grade/1)."""
    return _ENVIRONMENT.get_template("submission.html.j2").render(submission_view(report))


def render_cohort(reports: Sequence[dict[str, Any]]) -> str:
    """The page of a cohort: submissions by groups of items, the most frequent mistakes, statistics of each item.

    It lies in the folder of all reports, and links to each submission's own page below it.
    """
    return _ENVIRONMENT.get_template("cohort.html.j2").render(cohort_view(reports))
