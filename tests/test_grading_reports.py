"""One report, many formats: each valid, each saying the same, none obeying what a submission wrote."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from minigpt_dist.grading import classroom, cohort, gradescope, junit, markdown, outputs, rubric
from minigpt_dist.grading.answers import Answer, Unit, clipped
from minigpt_dist.grading.engine import Run
from minigpt_dist.grading.plan import merged, plan
from minigpt_dist.grading.report import EXIT_OF, SCHEMA_FILE, Terms, build, write
from minigpt_dist.grading.scoring import Offer
from minigpt_dist.grading.submission import Submission
from minigpt_dist.verify.contract import SLOTS

HOSTILE = "<script>alert(1)</script> ]]> | \x00\ud800 `# *x*`"
RIGHT = Offer("lesson", frozenset(n for slot, names in SLOTS.items() if slot != "ddp" for n in names))
EVIDENCE = {"check": "optimizer.plain", "world_size": 2, "rank": 1, "step": 3, "observed": "1", "expected": "2"}


def reported(run: Run, **terms: Any) -> dict[str, Any]:
    about = Submission("ada", "in/ada.py", "/in/ada.py", "ada.py", "0" * 64)
    return build(about, run, Terms(rubric.load(), seed=7, **terms))


def finished(**spoiled: str) -> Run:
    """Every unit passed, but those of the checks named."""
    units = merged(plan(rubric.load().items))
    answers = {u: Answer(*u, spoiled.get(u.check, "passed")) for u in units}
    for unit, answer in answers.items():
        if answer.outcome == "failed":
            answers[unit] = Answer(*unit, "failed", clipped(HOSTILE), {**EVIDENCE, "what": clipped(HOSTILE)})
    return Run(RIGHT, finished=True, answers=answers)


FAILED = {"optimizer.plain": "failed"}
RUNS: dict[str, tuple[Callable[[], Run], str]] = {
    "pass": (finished, "pass"),
    "fail": (lambda: finished(**FAILED), "fail"),
    "begun": (Run, "infrastructure"),
    "broken": (lambda: Run(broken="no sandbox"), "infrastructure"),
    "ungradable": (lambda: Run(error="importing it raised SyntaxError", finished=True), "ungradable"),
}


@pytest.mark.parametrize("name", RUNS)
def test_every_report_is_valid_and_adds_up(name: str) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    report = reported(RUNS[name][0]())
    jsonschema.validate(json.loads(json.dumps(report)), json.loads(SCHEMA_FILE.read_text()))
    assert report["verdict"] == RUNS[name][1]
    assert report["max_score"] == pytest.approx(sum(row["max_points"] for row in report["items"]))
    assert report["score"] in (None, pytest.approx(sum(row["points"] for row in report["items"])))


def test_a_report_begins_with_every_item_not_run() -> None:
    report = reported(Run())
    assert {row["outcome"] for row in report["items"] if row["group"] != "fsdp"} == {"not_run"}
    assert (report["score"], report["max_score"]) == (None, 100)


def test_full_points_pass_though_some_items_are_excused() -> None:
    report = reported(finished())
    excused = {row["group"] for row in report["items"] if row["outcome"] == "excused"}
    assert (report["verdict"], excused) == ("pass", {"ddp", "contract"})


def test_the_seed_is_committed_to_and_told_only_where_it_may_be() -> None:
    told, secret = reported(finished()), reported(finished(), reveal=False)
    assert told["environment"]["seed_commitment"] == secret["environment"]["seed_commitment"]
    assert told["environment"]["seed"] == 7
    assert "seed" not in secret["environment"]
    assert "--seed" not in json.dumps(secret)


def test_the_line_that_reproduces_an_item_names_it_and_all_that_steers_it() -> None:
    report = reported(finished(), slots=("optimizer",), rubric_file="my rubric.toml")
    line = next(row["reproduce"] for row in report["items"] if row["id"] == "optimizer.update")
    assert line == (
        "minigpt-dist grade in/ada.py --only optimizer.update --slots optimizer --rubric 'my rubric.toml' "
        "--isolation none --seed 7"
    )


@pytest.mark.parametrize("name", RUNS)
def test_junit_counts_each_item_once(name: str) -> None:
    report = reported(RUNS[name][0]())
    (suite,) = ElementTree.fromstring(junit.render(report)).findall("testsuite")
    cases = suite.findall("testcase")
    marks = {kind: sum(case.find(kind) is not None for case in cases) for kind in ("failure", "error", "skipped")}
    assert len(cases) == int(suite.attrib["tests"]) == len(report["items"])
    assert [str(n) for n in marks.values()] == [suite.attrib[k] for k in ("failures", "errors", "skipped")]


@pytest.mark.parametrize("name", RUNS)
def test_gradescope_gets_a_score_out_of_the_rubrics_total(name: str) -> None:
    report = reported(RUNS[name][0]())
    found = gradescope.render(report)
    wanted = 100 * (report["score"] or 0) / report["max_score"]
    assert found["score"] == pytest.approx(wanted, abs=1e-3)
    assert {t["status"] for t in found["tests"]} <= {"passed", "failed"}
    assert sum(t.get("max_score", 0) for t in found["tests"]) == pytest.approx(report["max_score"])


@pytest.mark.parametrize("name", RUNS)
def test_classroom_sums_to_the_score_and_leaks_no_test(name: str) -> None:
    report = reported(RUNS[name][0]())
    found = classroom.render(report)
    assert sum(t["score"] for t in found["tests"]) == pytest.approx(sum(row["points"] for row in report["items"]))
    assert {t["test_code"] for t in found["tests"]} == {""}


def test_markdown_obeys_nothing_that_a_submission_wrote() -> None:
    text = markdown.render(reported(finished(**FAILED)))
    assert "\n    optimizer.plain, world size 1, step 3, rank 1: <script>" in text  # indented: shown as it is
    assert all(line.startswith("    ") for line in text.splitlines() if "<script>" in line)


def test_markdown_never_outgrows_a_step_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    for _ in range(3):
        markdown.append_step_summary(markdown.capped("é" * 500_000))
    assert 0 < (tmp_path / "summary.md").stat().st_size <= markdown.MAX_BYTES


def test_hidden_items_tell_students_nothing(tmp_path: Path) -> None:
    table = rubric.DEFAULT.read_text().replace('visibility = "visible"', 'visibility = "hidden"')
    (tmp_path / "r.toml").write_text(table)
    about = Submission("ada", "in/ada.py")
    report = build(about, finished(**FAILED), Terms(rubric.load(tmp_path / "r.toml"), seed=7))
    assert "AdamW" not in markdown.render(report)
    assert {t["visibility"] for t in gradescope.render(report)["tests"]} == {"hidden"}


def test_a_name_that_is_no_text_is_written_all_the_same(tmp_path: Path) -> None:
    about = Submission("x", "in/\udcff.py", "", "\udcff.py", error="\udcff is bad")
    outputs.write_all(tmp_path, build(about, Run(error=about.error), Terms(rubric.load(), seed=7)))
    assert json.loads((tmp_path / "grade.json").read_text())["submission"]["path"] == "in/?.py"


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    write(tmp_path / "a" / "grade.json", "old")
    with pytest.raises(UnicodeEncodeError):
        write(tmp_path / "a" / "grade.json", "\ud800")
    assert [p.read_text() for p in (tmp_path / "a").iterdir()] == ["old"]


def test_every_format_is_written(tmp_path: Path) -> None:
    outputs.write_all(tmp_path, reported(finished()))
    names = {p.name for p in tmp_path.iterdir()} - {outputs.PAGE}
    assert names == {"grade.json", "results.json", "junit.xml", "classroom.json", "grade.md"}


def test_the_table_of_a_cohort_has_a_column_an_item_and_no_formula() -> None:
    reports = [reported(finished()), reported(Run(error="=cmd()", finished=True))]
    rows = [line.split(",") for line in cohort.table(reports, ["optimizer.update", "ddp.mean"]).splitlines()]
    assert rows[0] == [
        "submission",
        "verdict",
        "score",
        "max_score",
        "percent",
        "optimizer.update",
        "ddp.mean",
        "message",
    ]
    assert [row[5:7] for row in rows[1:]] == [["6", ""], ["0", "0"]]
    assert rows[2][-1] == "'=cmd()"


def test_item_statistics_count_who_was_asked() -> None:
    reports = [reported(finished()), reported(finished(**FAILED))]
    found = {row["id"]: row for row in cohort.item_statistics(reports)}
    assert found["optimizer.update"] == {
        "id": "optimizer.update",
        "asked": 2,
        "full": 1,
        "some": 0,
        "none": 1,
        "mean": 0.5,
    }
    assert found["ddp.mean"]["asked"] == 0


def test_every_verdict_has_an_exit_code() -> None:
    assert EXIT_OF == {"pass": 0, "fail": 1, "infrastructure": 3, "ungradable": 4}


def test_an_answer_survives_the_way_to_disk_and_back() -> None:
    answer = Answer("optimizer.plain", 2, "failed", "why", dict(EVIDENCE), 0.5)
    assert Answer.from_dict(json.loads(json.dumps(answer.to_dict()))) == answer
    assert answer.unit == Unit("optimizer.plain", 2)
