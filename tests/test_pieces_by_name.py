"""Pieces that are asked only by name: found on request, and no part of any other judgement."""

from __future__ import annotations

from pathlib import Path

import pytest
from submission_corpus import HERE

from minigpt_dist.__main__ import main
from minigpt_dist.grading.rubric import load
from minigpt_dist.launch import run_world
from minigpt_dist.verify.checks import CHECKS, judge
from minigpt_dist.verify.contract import BY_SHAPE, OPTIONAL, SLOTS
from minigpt_dist.verify.inspection import inspect_body
from minigpt_dist.verify.subject import Subject

PIECES = HERE / "bases" / "pieces.py"
# Keywords that a piece need not have.
EXTRAS = ("pipeline.interleaved", "tensor.dropout", "sequence.axes", "zero2.peak", "zero3.peak")
NAMED = tuple(slot for slot in OPTIONAL if slot not in BY_SHAPE)
ABOUT = [c.name for c in CHECKS.values() if set(c.slots) <= set(NAMED)]


@pytest.mark.slow
def test_right_pieces_pass_every_check_where_they_are_asked_for() -> None:
    with Subject(str(PIECES), NAMED) as subject:
        verdicts = judge(subject, [name for name in ABOUT if name not in EXTRAS], [3])
        verdicts += judge(subject, ["sequence.axes"], [4])
    assert [v.render(str(PIECES)) for v in verdicts if not v.passed] == []


def test_they_are_not_judged_where_they_are_not_asked_for(tmp_path: Path) -> None:
    text = PIECES.read_text(encoding="utf-8") + "\n\ndef make_corpus(seed, total_tokens):\n    return None\n"
    (tmp_path / "mine.py").write_text(text)
    with Subject(str(tmp_path / "mine.py")) as subject:
        verdicts = judge(subject, ("collectives.dtypes", "pipeline.live", "guard.loss"), [2])
    slots = ("collectives", "pipeline", "guard")
    assert ["--slots " + slot in v.not_judged for slot, v in zip(slots, verdicts, strict=True)] == [True] * 3


@pytest.mark.slow
def test_a_helper_that_is_called_like_one_changes_nothing_of_what_a_submission_is(tmp_path: Path) -> None:
    text = (HERE / "bases" / "torch_shape.py").read_text(encoding="utf-8")
    (tmp_path / "mine.py").write_text(text + "\n\ndef all_gather(parts, group):\n    return parts\n")
    (found,) = run_world(inspect_body, 1, str(tmp_path / "mine.py"), [])
    assert (found["shape"], "all_gather" in found["names"]) == ("torch", False)


def test_the_line_that_replays_a_failure_asks_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = PIECES.read_text(encoding="utf-8").replace("> 2 * last", "> 3 * last")
    (tmp_path / "mine.py").write_text(wrong)
    line = f"verify --impl {tmp_path / 'mine.py'} --slots guard --world-sizes 1 --only guard.spike"
    assert main(line.split()) == 1
    out = capsys.readouterr().out
    assert f"replay: minigpt-dist {line}\n" in out
    assert "step 1 rank 0: should_roll_back, with a mean loss of 2.5 after 1, is False, but should be True" in out


def test_a_name_that_is_missing_of_a_piece_asked_for_is_a_violation(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def ring_all_reduce(tensor):\n    pass\n")
    with Subject(str(tmp_path / "mine.py"), ("collectives",)) as subject:
        (verdict,) = judge(subject, ("collectives.all_gather",), [2])
    assert verdict.violations[0].observed.endswith("has no all_gather")


def test_the_default_rubric_is_worth_the_same_without_them() -> None:
    rubric = load()
    assert (rubric.total, sum(i.points for i in rubric.items if not i.optional)) == (100, 100)
    assert {slot for i in rubric.items if i.optional for slot in i.slots} == set(OPTIONAL)
    assert not set(rubric.lesson) & set(OPTIONAL)
    assert set(OPTIONAL) < set(SLOTS)


def test_an_item_of_a_piece_that_is_not_asked_for_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["grade", str(PIECES), "--only", "guard.spike"]) == 2
    assert (
        "only is 'guard.spike', which is asked by name, but should come with --slots guard" in capsys.readouterr().err
    )
