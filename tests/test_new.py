"""The starter earns nothing as it is, kindly; each piece that is written earns points by itself."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
from submission_corpus import HERE, graded, replaced

from minigpt_dist.__main__ import main
from minigpt_dist.cli.new import FILES, STARTER, write_starter
from minigpt_dist.launch import RankError
from minigpt_dist.verify.blame import unwritten
from minigpt_dist.verify.checks import judge
from minigpt_dist.verify.contract import OPTIONAL, SLOTS
from minigpt_dist.verify.subject import Subject

NAMES = ("lesson", "wrapper", "fsdp_flat", "pieces")
BASES = {name: (HERE / "bases" / f"{name}.py").read_text(encoding="utf-8") for name in NAMES}
BASE_OF = {"ddp": "wrapper", **dict.fromkeys(OPTIONAL, "pieces"), "fsdp": "fsdp_flat"}  # by slot; else the lesson's
# What a piece's functions need beside them, and the import lines of all bases.
HELPERS = {
    "model": ("Block",),
    "checkpoint": ("write", "encode", "decode", "verified"),
    "fsdp": ("Unit",),
    "collectives": ("swap", "reduced", "passed_round"),
}


def part(text: str, name: str) -> str:
    """The source of a definition at the top of `text`."""
    found = next(n for n in ast.parse(text).body if getattr(n, "name", "") == name)
    return ast.get_source_segment(text, found) or ""


def fill(folder: Path, slot: str) -> None:
    """Write one piece of the starter, from a right submission."""
    solution = folder / "solution.py"
    text, right = solution.read_text(encoding="utf-8"), BASES[BASE_OF.get(slot, "lesson")]
    for name in SLOTS[slot]:
        text = replaced(text, name, part(right, name))
    modules = ("datetime import timedelta", "pathlib import Path", "torch import distributed as dist")
    imports = "import hashlib, io, json, math, os\n" + "".join(f"from {module}\n" for module in modules)
    helpers = "\n\n\n".join(part(right, name) for name in HELPERS.get(slot, ()))
    first = text.index("class MiniGPT")
    solution.write_text(f"{text[:first]}{imports}\n\n{helpers}\n\n\n{text[first:]}", encoding="utf-8")


def test_new_writes_the_starter_and_says_what_comes_next(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new", str(tmp_path / "mine")]) == 0
    assert {p.name for p in (tmp_path / "mine").iterdir()} == set(FILES)
    assert "next: minigpt-dist grade" in capsys.readouterr().out


@pytest.mark.parametrize("what", ["a file in it", "a file in its place"])
def test_new_overwrites_nothing(what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "notes.txt" if what == "a file in its place" else tmp_path
    (tmp_path / "notes.txt").write_text("mine")
    assert main(["new", str(target)]) == 2
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_every_name_of_the_contract_is_a_stub_that_says_its_own_name() -> None:
    tree = ast.parse((STARTER / "solution.py").read_text(encoding="utf-8"))
    stubs = {n.name: n for n in tree.body if isinstance(n, (ast.ClassDef, ast.FunctionDef))}
    assert set(stubs) == {name for names in SLOTS.values() for name in names}
    for name, node in stubs.items():
        methods = node.body if isinstance(node, ast.ClassDef) else [node]
        for function in (f for f in methods if isinstance(f, ast.FunctionDef)):
            whole = name if function is node else f"{name}.{function.name}"
            assert f"'{whole} is not written yet'" in ast.unparse(function)


@pytest.mark.parametrize(
    "message, found", [("A.f is not written yet", "A.f"), ("", "step"), ("TODO", "step"), ("no bfloat16 here", "")]
)
def test_a_stub_is_told_from_a_refusal(message: str, found: str) -> None:
    error = RankError(0, "NotImplementedError", message, 'File "x.py", line 3, in step\n')
    assert unwritten(error) == found
    assert unwritten(RankError(0, "ValueError", message, error.traceback)) == ""


def test_a_stub_is_reported_as_not_written_yet_and_not_as_an_error(tmp_path: Path) -> None:
    write_starter(tmp_path / "mine")
    with Subject(str(tmp_path / "mine")) as subject:
        verdicts = judge(
            subject, ("corpus", "broadcast.last", "broadcast.layouts", "optimizer.mixed", "ddp.plain"), [2]
        )
    told = [v.violations[0].what + " is " + v.violations[0].observed for v in verdicts]
    stubs = (
        "make_corpus",
        "broadcast_parameters",
        "broadcast_parameters",
        "ZeroOptimizer.__init__",
        "DistributedDataParallel.__init__",
    )
    assert told == [f"{stub} is not written yet" for stub in stubs]


@pytest.mark.corpus
@pytest.mark.timeout(1800)
def test_each_piece_that_is_written_raises_the_score(tmp_path: Path) -> None:
    write_starter(tmp_path / "mine")
    scores: list[Any] = [graded(tmp_path / "mine", tmp_path)["score"]]
    for slot in (slot for slot in SLOTS if slot not in OPTIONAL):
        fill(tmp_path / "mine", slot)
        report = graded(tmp_path / "mine", tmp_path)
        scores.append(report["score"])
    assert scores[0] == 0
    assert scores == sorted(set(scores))
    assert (report["verdict"], scores[-1]) == ("pass", report["max_score"])


@pytest.mark.corpus
@pytest.mark.timeout(600)
@pytest.mark.parametrize("slot", SLOTS)
def test_a_piece_alone_earns_all_its_points_in_our_company(slot: str, tmp_path: Path) -> None:
    write_starter(tmp_path / "mine")
    stub = graded(tmp_path / "mine", tmp_path, "--slots", slot)
    fill(tmp_path / "mine", slot)
    report = graded(tmp_path / "mine", tmp_path, "--slots", slot)
    assert (stub["score"], report["verdict"], report["score"] > 0) == (0, "pass", True)
