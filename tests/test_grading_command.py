"""`minigpt-dist grade` from end to end: files in, exit codes, reports and cohorts out, whatever becomes of its workers."""

from __future__ import annotations

import csv
import functools
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from minigpt_dist.__main__ import main
from minigpt_dist.launch.sandbox import isolation

CORPUS = """
import torch

def make_corpus(seed, total_tokens, vocab=64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab, (total_tokens,), generator=generator)
"""
FAULT = "fault:broadcast-tree-misses-the-odd-rank"
UNSEEDED = CORPUS.replace(", generator=generator", "")
TERMS = ["--only", "corpus", "--slots", "corpus", "--isolation", "none", "--seed", "7"]


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "minigpt_dist", "grade", *words]


def verdicts(out: Path) -> dict[str, str]:
    return {p.parent.name: json.loads(p.read_text())["verdict"] for p in out.glob("*/grade.json")}


def lasting(out: Path, name: str) -> dict[str, Any]:
    """A report without what may differ between two gradings of the same thing."""
    report: dict[str, Any] = json.loads((out / name / "grade.json").read_text())
    for part in (report, *report["items"]):
        part.pop("duration_s")
    return report


@pytest.mark.slow
def test_a_cohort_is_graded_and_one_bad_submission_harms_nobody(tmp_path: Path) -> None:
    for name, text in {"right": CORPUS, "broken": "def f(:"}.items():
        (tmp_path / f"{name}.py").write_text(text)
    assert main(["grade", str(tmp_path), "--out", str(tmp_path / "out"), "-n", "0", *TERMS]) == 4
    assert verdicts(tmp_path / "out") == {"right": "pass", "broken": "ungradable"}
    rows = list(csv.DictReader((tmp_path / "out" / "grades.csv").read_text().splitlines()))
    assert [(row["submission"], row["corpus.seeded"]) for row in rows] == [
        ("broken", "0"),
        ("right", "1"),
    ]


@pytest.mark.parametrize(
    "words, told",
    [
        (["nosuch.py"], "path is 'nosuch.py'"),
        ([".", "--only", "nosuch"], "item is 'nosuch'"),
        ([".", "--slots", "nosuch"], "slot is 'nosuch'"),
        ([".", "--isolation", "nosuch"], "isolation is 'nosuch'"),
        ([".", "--rubric", "nosuch.toml"], "rubric 'nosuch.toml' cannot be read"),
        ([".", "-n", "-1"], "n is -1"),
        ([".", "--seed", "x"], "seed is 'x'"),
        ([".", "--budget", "nan"], "budget is nan"),
        ([".", "--resume"], "resume needs --out"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_2(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["grade", *words]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("mode, said", [("auto", True), ("bwrap", True), ("none", False)])
def test_isolation_weaker_than_asked_is_said_before_anything_runs(
    mode: str, said: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(isolation, "_failure", lambda name: None if name == "none" else "no right for it")
    assert main(["grade", str(tmp_path), "--single", "--isolation", mode]) == 4  # an empty folder
    assert ("run with isolation none: " in capsys.readouterr().err) is said


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_grade_is_the_same_without_workers_with_two_and_when_one_is_killed(tmp_path: Path) -> None:
    terms = ["--only", "corpus,broadcast,invariant.norms", "--isolation", "none", "--seed", "7"]
    for n in ("0", "2"):
        assert main(["grade", FAULT, "--out", str(tmp_path / n), "-n", n, *terms]) in (0, 1)
    process = subprocess.Popen(command(FAULT, "--out", str(tmp_path / "k"), "-n", "2", *terms))
    os.kill(await_child(process.pid), signal.SIGKILL)
    assert process.wait(300) in (0, 1)
    (first, *others) = (lasting(tmp_path / n, FAULT.replace(":", "_")) for n in ("0", "2", "k"))
    assert others == [first, first]


def children(pid: int) -> list[int]:
    """Grading workers among the children of a process."""
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    threads = [p.read_text().split() for p in Path(f"/proc/{pid}/task").glob("*/children")]
    every = {int(c) for row in (found, *threads) for c in row}
    return [c for c in every if b"grading.worker" in Path(f"/proc/{c}/cmdline").read_bytes()]


def await_child(pid: int) -> int:
    """The first worker of a grader, as soon as it has one with a rank server of its own."""
    limit = time.monotonic() + 120
    while time.monotonic() < limit:
        for worker in children(pid):
            if Path(f"/proc/{worker}/task/{worker}/children").read_text().split():
                return worker
        time.sleep(0.05)  # between two looks at another process, until the limit; nothing is said of how long it takes
    raise AssertionError("no worker has started")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_interrupt_leaves_a_true_report_and_a_resume_ends_it(tmp_path: Path) -> None:
    out, words = tmp_path / "out", ["fault:none", "--only", "optimizer,broadcast", "--isolation", "none", "-n", "1"]
    listens = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a job in a shell's background does not
    process = subprocess.Popen(command(*words, "--out", str(out)), preexec_fn=listens)
    answers = out / "fault_none" / "answers.jsonl"
    limit = time.monotonic() + 120
    while time.monotonic() < limit and not (answers.exists() and answers.read_text().count("\n") > 1):
        time.sleep(0.05)  # between two looks at another process, until the limit; nothing is said of how long it takes
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    kept, report = answers.read_text(), lasting(out, "fault_none")
    assert (report["verdict"], report["score"]) == ("infrastructure", None)
    assert {row["outcome"] for row in report["items"]} >= {"not_run"}
    assert main(["grade", *words, "--out", str(out), "--resume"]) == 0
    assert answers.read_text().startswith(kept)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_line_that_reproduces_an_item_loses_it_again(tmp_path: Path) -> None:
    (tmp_path / "wrong one.py").write_text(UNSEEDED)
    main(["grade", str(tmp_path / "wrong one.py"), "--out", str(tmp_path / "out"), "-n", "1", *TERMS])
    rows = lasting(tmp_path / "out", "wrong_one")["items"]
    line = next(row["reproduce"] for row in rows if row["id"] == "corpus.seeded")
    done = subprocess.run(command(*shlex.split(line)[2:]), capture_output=True, text=True, timeout=200)
    assert (done.returncode, "corpus, world size" in done.stdout) == (1, True)


BAD = {
    "syntax": ("def f(:", "SyntaxError"),
    "imports": ("from os import nothing_there", "ImportError"),
    "endless": ("while True: pass", "did not end within"),
    "exits": ("import os; os._exit(0)", "ended the process"),
    "garbage": ("\x00\x01\x02", "null bytes"),
    "nothing": ("x = 1", "offers nothing"),
}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_cannot_be_imported_is_ungradable_in_one_line(tmp_path: Path) -> None:
    for name, (text, _) in BAD.items():
        (tmp_path / f"{name}.py").write_text(text)
    words = ["--out", str(tmp_path / "out"), "-n", "2", "--deadline", "15", "--isolation", "none", "--only", "corpus"]
    assert main(["grade", str(tmp_path), *words]) == 4
    assert set(verdicts(tmp_path / "out").values()) == {"ungradable"}
    for name, (_, told) in BAD.items():
        assert told in lasting(tmp_path / "out", name)["message"]
