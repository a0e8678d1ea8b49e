"""Workers are killed, hang, or cannot be started: the same answers, or an outcome with the right name."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from minigpt_dist.grading import rubric
from minigpt_dist.grading.answers import Answer, Unit
from minigpt_dist.grading.crew import BrokenGraderError, OutOfTimeError, WorkerLostError
from minigpt_dist.grading.engine import Run, grade
from minigpt_dist.grading.grader import Grader, Order
from minigpt_dist.grading.plan import Group, Step, answers, unanswered
from minigpt_dist.verify.contract import SLOTS
from minigpt_dist.verify.subject import Subject

OFFER = {"shape": "lesson", "names": [n for names in SLOTS.values() for n in names], "error": ""}
FOUND = ("shape", "slots", "names", "origins", "borrowed", "stood_in")
ITEMS = [i for i in rubric.load().items if i.group == "checkpoint"]


@dataclass
class Scripted:
    """A lane that answers at once, but for the errors that it is told to raise first, by the name of a group."""

    raises: dict[str, list[Exception]] = field(default_factory=dict)
    offer: dict[str, Any] = field(default_factory=lambda: dict(OFFER))
    asked: list[str] = field(default_factory=list)
    opened: int = 0
    leaves_open: str = ""  # a check that is answered at the second asking only

    def prepare(self) -> None: ...

    def open(self, order: Order, *, inspect: bool, limit: float) -> dict[str, Any]:
        self.opened += 1
        self._next("open")
        return self.offer

    def ask(self, group: Group, limit: float) -> list[Answer]:
        self._next(group.name)
        self.asked.append(group.name)
        first = self.asked.count(group.name) == 1
        return [Answer(*unit, "passed") for unit in group.units if not (first and unit.check == self.leaves_open)]

    def _next(self, name: str) -> None:
        if self.raises.get(name):
            raise self.raises[name].pop(0)

    def close(self) -> None: ...

    def end(self) -> None: ...


def graded(*lanes: Scripted, run: Run | None = None, budget_s: float = 100.0) -> Run:
    run = run or Run()
    grade(run, Order("x"), rubric.load(), ITEMS, lanes, budget_s=budget_s, changed=lambda: None)
    return run


def outcomes(run: Run, world_size: int = 2) -> set[str]:
    return {a.outcome for a in run.answers.values() if a.world_size == world_size}


def test_the_answers_do_not_depend_on_the_number_of_lanes() -> None:
    alone, three = graded(Scripted()), graded(Scripted(), Scripted(), Scripted())
    assert alone.answers == three.answers
    assert alone.finished


def test_a_killed_workers_group_is_asked_again_whole() -> None:
    lane = Scripted({"checkpoint@2": [WorkerLostError(), WorkerLostError()]})
    assert graded(lane).answers == graded(Scripted()).answers
    assert lane.opened == 3


def test_a_group_that_kills_every_worker_is_crashed_and_the_rest_is_not() -> None:
    run = graded(Scripted({"checkpoint@2": [WorkerLostError()] * 3}))
    assert (outcomes(run), outcomes(run, 3)) == ({"crashed"}, {"passed"})
    assert run.finished


def test_a_submission_that_kills_every_worker_on_import_is_ungradable() -> None:
    run = graded(Scripted({"open": [WorkerLostError()] * 3}))
    assert run.error == "the grading process was killed while it was asked, 3 times over"


def test_a_lane_whose_worker_is_lost_in_the_first_round_is_opened_again_for_the_second() -> None:
    failing = {"checkpoint@1": [WorkerLostError()] * 3, "checkpoint@4": [WorkerLostError()] * 3}
    lane = Scripted(failing, leaves_open="checkpoint.tensors")
    run = graded(lane)
    assert run.answers[Unit("checkpoint.tensors", 2)].outcome == "passed"
    assert lane.asked.count("checkpoint@2") == 2


def test_time_that_is_used_up_is_a_timeout_for_all_that_is_left() -> None:
    run = graded(Scripted({"checkpoint@2": [OutOfTimeError()]}))
    assert outcomes(run) == {"timeout"}
    assert {a.outcome for a in graded(Scripted(), budget_s=0).answers.values()} == {"timeout"}


def test_what_cannot_be_started_is_ours_to_mend() -> None:
    run = graded(Scripted({"open": [BrokenGraderError("no torch")]}))
    assert (run.broken, run.finished) == ("no torch", False)


def test_a_sandbox_that_breaks_in_one_lane_stops_all() -> None:
    lanes = [Scripted({"checkpoint@2": [BrokenGraderError("no disk")]}) for _ in range(2)]
    assert graded(*lanes).broken == "no disk"


def test_an_import_error_is_told_and_nothing_is_asked() -> None:
    lane = Scripted(offer={"error": "importing it raised X"})
    assert (graded(lane).error, lane.asked) == ("importing it raised X", [])


def test_answers_that_are_there_are_not_asked_again() -> None:
    lane, first = Scripted(), graded(Scripted())
    graded(lane, run=Run(answers={u: a for u, a in first.answers.items() if u.world_size != 3}))
    assert lane.asked == ["checkpoint@3"]


def test_an_interrupt_passes_through_and_leaves_what_was_answered() -> None:
    run = Run()
    with pytest.raises(KeyboardInterrupt):
        graded(Scripted({"checkpoint@3": [KeyboardInterrupt()]}), run=run)  # type: ignore[list-item]  # no Exception, as in life
    assert outcomes(run, 4) == {"passed"}
    assert not run.finished


def test_after_a_hang_an_item_and_what_requires_it_are_spared(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def ask(subject: Subject, unit: Unit) -> Answer:
        asked.append(unit.check)
        return Answer(*unit, "timeout" if unit.check == "optimizer.plain" else "passed")

    monkeypatch.setattr("minigpt_dist.grading.plan.ask", ask)
    steps = (
        Step("update", (), ("optimizer.plain", "optimizer.long")),
        Step("tied", ("update",), ("optimizer.tied",)),
        Step("other", (), ("optimizer.frozen",)),
    )
    found = {a.check: (a.outcome, a.message) for a in answers(Group("pieces", 2, steps), Subject("x"))}
    assert asked == ["optimizer.plain", "optimizer.frozen"]
    spared = "not asked, because optimizer.plain got stuck at this world size"
    assert found["optimizer.long"] == found["optimizer.tied"] == ("timeout", spared)


def test_what_requires_an_item_that_fails_is_left_open_until_its_outcome_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "minigpt_dist.grading.plan.ask",
        lambda subject, unit: Answer(*unit, "failed" if unit.check == "optimizer.plain" else "passed"),
    )
    steps = (
        Step("update", (), ("optimizer.plain",)),
        Step("tied", ("update",), ("optimizer.tied",)),
        Step("deep", ("tied",), ("optimizer.frozen",)),
        Step("other", (), ("optimizer.betas",)),
    )
    group = Group("pieces", 2, steps)
    found = {a.unit for a in answers(group, Subject("x"))}
    assert {unit.check for unit in found} == {"optimizer.plain", "optimizer.betas"}
    assert [step.item for part in unanswered([group], found) for step in part.steps] == ["tied", "deep"]


@pytest.mark.parametrize("answer", [None, [], {"names": []}, {name: [] for name in FOUND}])
def test_an_inspection_that_no_rank_of_ours_sends_ends_in_a_line(answer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Subject, "ask", lambda *args: [answer])
    error = Grader(Order("hand_in.py")).inspect()["error"]
    assert error.startswith("importing it broke the rank")
