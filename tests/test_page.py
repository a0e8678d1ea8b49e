"""Pages of grades show what a student needs, nothing hidden, and nothing that a submission could make of them."""

from __future__ import annotations

import copy
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("jinja2", reason="pages need jinja2, of the extra `grading`")

from minigpt_dist.grading.page import render, render_cohort
from minigpt_dist.grading.page.text import CUT, LONGEST, MOST_LINES, NONE, number, plain

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
VOID = {"meta", "br", "link", "img", "input", "hr"}
HOSTILE = "</pre><script>alert(1)</script><img src=http://evil.example/x>"


def item(id: str, outcome: str = "passed", points: float = 2.0, **more: Any) -> dict[str, Any]:
    group = id.partition(".")[0]
    row = {"id": id, "number": "1.1", "title": f"Title of {id}", "group": group, "lesson": "78 ZeRO", "points": points}
    row |= {
        "max_points": 2.0,
        "worth": 2.0,
        "outcome": outcome,
        "visibility": "visible",
        "requires": [],
        "message": "",
    }
    row |= {"hint": "", "evidence": None, "reproduce": f"minigpt-dist grade x.py --only {id}", "duration_s": 0.1}
    return row | more


EVIDENCE = {
    "world_size": 3,
    "rank": 1,
    "step": 2,
    "tensor": "p0",
    "element": 7,
    "observed": "-2.5",
    "expected": "-2.25",
}
WRONG = {"message": "p0 is -2.5", "hint": "in general", "evidence": {**EVIDENCE, "hint": "summed, not divided"}}


def report(*items: dict[str, Any], name: str = "ada") -> dict[str, Any]:
    rows = items or (item("model.decoder"), item("optimizer.update", "failed", 0.0, **WRONG))
    score, most = sum(r["points"] for r in rows), sum(r["max_points"] for r in rows)
    return {
        "schema": "minigpt-dist-grade/1",
        "suite": {"version": "0.1.0", "rubric": "all", "rubric_sha256": "ab" * 32, "rubric_total": 4},
        "submission": {"name": name, "path": f"{name}.py", "entry": "x.py", "sha256": "cd" * 32, "borrowed": {}},
        "environment": {"python": "3.11", "torch": "2.6", "isolation": "bwrap", "seed_commitment": "sha256:ef"},
        "score": score,
        "max_score": most,
        "verdict": "pass" if score == most else "fail",
        "message": "",
        "items": list(rows),
    }


class Page(HTMLParser):
    """The page's elements, checked to be nested right, and its text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data if self.open[-1:] != ["style"] else ""

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


@pytest.mark.parametrize(
    "html", [render(report()), render_cohort([report(), report(name="bob")])], ids=["one", "cohort"]
)
def test_a_page_needs_no_network_and_runs_no_script(html: str) -> None:
    page = Page(html)
    assert {tag for tag, _ in page.tags} & {"script", "link", "img", "iframe", "object", "form"} == set()
    assert not re.search(r"https?:|url\(|@import|\bon\w+=", html)
    assert [m["content"] for m in page.of("meta") if m.get("http-equiv")] == [
        "default-src 'none'; style-src 'unsafe-inline'"
    ]


def test_a_page_says_where_it_first_went_wrong_with_both_values_a_hint_and_the_line_that_shows_it_again() -> None:
    text = Page(render(report())).text
    for words in ("2 of 4 points", "Start here", "world size", "tensor", "p0", "-2.5", "-2.25", "summed, not divided"):
        assert words in " ".join(text.split())
    assert "minigpt-dist grade x.py --only optimizer.update" in text


def test_a_piece_is_named_first_before_the_composition_that_fails_because_of_it() -> None:
    rows = item("invariants.loss", "failed", 0.0, message="loss rose"), item("optimizer.update", "failed", 0.0, **WRONG)
    assert "1.1 Title of optimizer.update" in Page(render(report(*rows))).text.partition("Start here")[2][:120]


def test_of_a_hidden_item_nothing_is_shown_but_what_it_is_worth() -> None:
    hidden = item("memory.secret", "failed", 0.0, visibility="hidden", **WRONG)
    text = Page(render(report(item("model.decoder"), hidden))).text
    assert "A check that is not shown" in text
    for secret in ("memory.secret", "p0", "summed", "failed", "in general"):
        assert secret not in text


@pytest.mark.parametrize("where", ["title", "message", "hint", "reproduce", "name", "tensor", "borrowed", "group"])
def test_text_of_a_submission_stays_text(where: str) -> None:
    hostile = report()
    row = hostile["items"][1]
    if where == "name":
        hostile["submission"] |= {"name": HOSTILE, "path": HOSTILE}
    elif where == "tensor":
        row["evidence"] = {**EVIDENCE, HOSTILE: HOSTILE}
    elif where == "borrowed":
        hostile["submission"]["borrowed"] = {HOSTILE: HOSTILE}
    else:
        row[where] = HOSTILE
    for html in (render(hostile), render_cohort([hostile])):
        page = Page(html)
        assert not page.of("script")
        assert not page.of("img")


def test_text_is_capped_and_cannot_change_how_it_reads() -> None:
    assert len(plain("x" * 10_000_000)) == LONGEST + len(CUT)
    assert plain("line\n" * 1000).count("\n") < MOST_LINES
    assert plain("a\u202egnp.exe\x1b[31m\x00") == "a\ufffdgnp.exe\ufffd[31m\ufffd"
    assert plain("as it is") == "as it is"


def test_points_are_spelled_as_a_person_does() -> None:
    assert [number(x) for x in (3.0, 2.5, 0.3333, 0, None, True)] == ["3", "2.5", "0.33", "0", NONE, NONE]


def test_what_was_not_checked_is_listed_with_its_reason_once() -> None:
    left = item("optimizer.groups", "excused", 0.0, max_points=0.0, message="not judged: no way to set groups")
    text = Page(render(report(item("model.decoder"), left))).text
    assert "Not checked, and why" in text
    assert text.count("no way to set groups") == 1
    assert "2 of 2 points" in " ".join(text.split())


@pytest.mark.parametrize("verdict", ["ungradable", "infrastructure"])
def test_a_submission_without_a_grade_is_told_why(verdict: str) -> None:
    broken = {**report(), "verdict": verdict, "message": "importing it raised SyntaxError", "score": None}
    assert "importing it raised SyntaxError" in Page(render(broken)).text


def test_outcomes_differ_by_a_sign_and_a_word_and_tables_have_scopes() -> None:
    page = Page(render(report()))
    assert {"✓passed", "✗failed"} <= set(re.findall(r"[✓✗]\s*\w+", page.text))
    assert all("scope" in attributes for attributes in page.of("th"))
    assert [tag for tag, _ in page.tags if tag in ("h1", "h2", "h3")][:2] == ["h1", "h2"]


def test_a_cohort_page_links_to_each_page_and_counts_shared_mistakes() -> None:
    other = report(item("model.decoder"), item("optimizer.update", "failed", 0.0, **WRONG), name="b & c")
    page = Page(render_cohort([report(), other, report(item("model.decoder"), name="full")]))
    assert {a["href"] for a in page.of("a")} >= {"ada/grade.html", "b%20%26%20c/grade.html", "full/grade.html"}
    assert re.search(r"2\s+Title of optimizer.update\s*summed, not divided", page.text)


def test_a_cohort_counts_only_those_who_were_asked() -> None:
    left = item("optimizer.update", "excused", 0.0, max_points=0.0)
    page = Page(render_cohort([report(), report(item("model.decoder"), left, name="bob")]))
    assert re.search(r"Title of optimizer.updateoptimizer\s+0 %\s+0 / 21\s", page.text)  # mean 0 of 2, 1 asked


def test_a_report_is_not_changed_by_being_shown() -> None:
    mine = report()
    before = copy.deepcopy(mine)
    render(mine), render_cohort([mine])
    assert mine == before


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here to look at a page with")
@pytest.mark.parametrize("width", [360, 1200])
def test_a_browser_shows_a_page_no_wider_than_its_window(tmp_path: Path, width: int) -> None:
    """The page alone in a frame of that width; a probe beside it, which the page's own policy would not allow, measures it."""
    rows = [
        item(f"{g}.x", o, 1.0, title="a long title " * 6, **WRONG)
        for g in "abcd"
        for o in ("passed", "failed", "timeout")
    ]
    inner = render(report(*rows, name="w" * 200)).replace("default-src 'none'; style-src 'unsafe-inline'", "")
    (tmp_path / "page.html").write_text(inner, encoding="utf-8")
    probe = "onload='document.title=this.contentDocument.documentElement.scrollWidth'"
    frame = f"<iframe src=page.html style='width:{width}px;height:900px;border:0' {probe}></iframe>"
    (tmp_path / "frame.html").write_text(f"<!doctype html><title>none</title>{frame}", encoding="utf-8")
    assert CHROMIUM is not None
    options = (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--allow-file-access-from-files",
        f"--user-data-dir={tmp_path}/p",
    )
    command = [CHROMIUM, *options, "--virtual-time-budget=5000", "--dump-dom", (tmp_path / "frame.html").as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    (found,) = re.findall(r"<title>(\w+)</title>", shown)
    assert width - 20 <= int(found) <= width  # a scroll bar beside it takes the rest
