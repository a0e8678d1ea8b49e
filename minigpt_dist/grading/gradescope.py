"""A report as Gradescope's results.json."""

from __future__ import annotations

from typing import Any

from minigpt_dist.grading.report import summary


def render(report: dict[str, Any]) -> dict[str, Any]:
    """One test an item. The score is brought to the rubric's total, which is the assignment's, where some items do not apply."""
    total = report["suite"]["rubric_total"]
    graded = report["score"] is not None and report["max_score"] > 0
    score = round(report["score"] * total / report["max_score"], 4) if graded else 0.0
    return {
        "score": score,
        "execution_time": round(report["duration_s"]),
        "output": f"{summary(report)}. Graded by minigpt-dist {report['suite']['version']}.",
        "output_format": "text",
        "test_output_format": "text",
        "test_name_format": "text",
        "visibility": "visible",
        "stdout_visibility": "hidden",
        "extra_data": {"schema": report["schema"], "verdict": report["verdict"]},
        "tests": [_test(row) for row in report["items"]],
    }


def _test(row: dict[str, Any]) -> dict[str, Any]:
    found = {
        "name": row["title"],
        "number": row["number"],
        "status": "passed" if row["outcome"] in ("passed", "excused") else "failed",
        "output": _output(row),
        "tags": [row["group"]],
        "visibility": row["visibility"],
        "extra_data": {"id": row["id"], "outcome": row["outcome"]},
    }
    return found if row["outcome"] == "excused" else found | {"score": row["points"], "max_score": row["max_points"]}


def _output(row: dict[str, Any]) -> str:
    lines = [row["message"] or row["outcome"], f"hint: {row['hint']}" if row["hint"] else ""]
    lines.append(f"see lesson {row['lesson']}" if row["hint"] and row["lesson"] else "")
    return "\n".join(line for line in lines if line)
