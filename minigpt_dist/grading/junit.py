"""A report as JUnit XML: one test case an item, so that points are counted once."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

ILLEGAL = dict.fromkeys((*range(9), 11, 12, *range(14, 32), 65534, 65535, *range(55296, 57344)), " ")


def render(report: dict[str, Any]) -> str:
    """The XML text. Lost items are failures, items that were not run are errors, what was not asked is skipped."""
    cases = report["items"]
    suite = ElementTree.Element("testsuite", name="minigpt-dist grade")
    counts = {"failures": 0, "errors": 0, "skipped": 0}
    for row in cases:
        case = ElementTree.SubElement(
            suite, "testcase", classname=row["group"], name=row["id"], time=f"{row['duration_s']:.3f}"
        )
        kind = _kind(row)
        if kind:
            counts[kind[0]] += 1
            found = ElementTree.SubElement(case, kind[1], message=_text(row["message"] or row["outcome"]))
            found.text = _text(f"{row['title']}: {row['points']:g} of {row['max_points']:g}. {row['hint']}")
    attributes = {"tests": len(cases), **counts, "time": f"{report['duration_s']:.3f}"}
    suite.attrib.update({name: str(value) for name, value in attributes.items()})
    root = ElementTree.Element("testsuites")
    root.append(suite)
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _kind(row: dict[str, Any]) -> tuple[str, str] | None:
    """(attribute that counts it, element that tells it); None for an item that passed."""
    if row["outcome"] == "passed":
        return None
    if row["outcome"] == "excused":
        return "skipped", "skipped"
    return ("errors", "error") if row["outcome"] in ("not_run", "crashed", "timeout") else ("failures", "failure")


def _text(text: str) -> str:
    return text.translate(ILLEGAL)
