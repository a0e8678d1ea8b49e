"""Grading one submission: its contract first, then its groups, on as many lanes as there are, each group until it is answered.

Owns what happens when a worker is killed, when time runs out, and when nothing can be started. The answers depend on none of it but the
last two. Leaves processes to `crew`, the order to `plan`, and points to `scoring`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from minigpt_dist.grading.answers import Answer, Unit
from minigpt_dist.grading.crew import BrokenGraderError, Lane, OutOfTimeError, WorkerLostError
from minigpt_dist.grading.grader import Order
from minigpt_dist.grading.plan import Group, plan, unanswered
from minigpt_dist.grading.rubric import Item, Rubric
from minigpt_dist.grading.scoring import Offer, Scorer

TRIES = 3  # workers that one group may lose
LOST = "the grading process was killed while it was asked, {} times over"
LATE = "the submission's time was used up: {:g} s"


@dataclass
class Run:
    """What is known of one submission so far.

    error: why it cannot be graded. broken: why we could not. finished: nothing is left to ask.
    """

    offer: Offer = field(default_factory=lambda: Offer("lesson", frozenset()))
    error: str = ""
    broken: str = ""
    finished: bool = False
    answers: dict[Unit, Answer] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass
class _Queue:
    """The groups still to be asked, which lanes have the submission open, and what they found, shared by their threads."""

    run: Run
    changed: Callable[[], None]
    waiting: list[Group] = field(default_factory=list)
    opened: set[int] = field(default_factory=lambda: {0})  # the first lane has inspected it
    lock: threading.Lock = field(default_factory=threading.Lock)
    stopped: bool = False
    error: BaseException | None = None

    def next(self) -> Group | None:
        with self.lock:
            return None if self.stopped or not self.waiting else self.waiting.pop(0)

    def take(self, answers: Sequence[Answer]) -> None:
        with self.lock:
            self.run.answers.update({a.unit: a for a in answers})
            self.changed()

    def stop(self, error: BaseException) -> None:
        with self.lock:
            self.error, self.stopped = self.error or error, True


def grade(
    run: Run,
    order: Order,
    rubric: Rubric,
    items: Sequence[Item],
    lanes: Sequence[Lane],
    *,
    budget_s: float,
    changed: Callable[[], None],
) -> None:
    """Fill `run`, calling `changed` after every group. Answers that `run` has already are not asked for again.

    Leaves `run.error` or `run.broken` set where there can be no grade. KeyboardInterrupt passes through, with every lane ended.
    """
    start = time.monotonic()
    limit = start + budget_s
    try:
        for lane in lanes:
            lane.prepare()
        _inspect(run, order, lanes[0], limit)
        if not run.error:
            queue = _Queue(run, changed)
            for again in (False, True):
                queue.waiting = _open(run, rubric, items, again)
                _ask_all(queue, order, lanes, limit, budget_s)
        run.finished = True
    except BrokenGraderError as error:
        run.broken = str(error)
    finally:
        run.seconds += time.monotonic() - start


def _open(run: Run, rubric: Rubric, items: Sequence[Item], again: bool) -> list[Group]:
    """What is still to be asked: first whole groups, whose answers share runs, then what waited for the outcome of what it requires."""
    scorer, results = Scorer(rubric, run.offer), Scorer(rubric, run.offer).results(run.answers)
    asked = [i for i in items if not i.is_contract and scorer.answerable(i) and results[i.id].outcome != "skipped"]
    left = unanswered(plan(asked), run.answers)
    return left if again else [g for g in plan(asked) if g.name in {part.name for part in left}]


def _inspect(run: Run, order: Order, lane: Lane, limit: float) -> None:
    """Find out what the submission offers, or why it cannot be graded."""
    for _ in range(TRIES):
        try:
            found = lane.open(order, inspect=True, limit=limit)
        except WorkerLostError:
            continue
        except OutOfTimeError:
            run.error = "importing it did not end in time"
            return
        run.error = found.get("error", "")
        run.offer = Offer.of(found, order.slots)
        return
    run.error = LOST.format(TRIES)


def _ask_all(queue: _Queue, order: Order, lanes: Sequence[Lane], limit: float, budget_s: float) -> None:
    """Every waiting group; in this thread if one lane is enough, so that an interrupt reaches it."""
    used = lanes[: max(1, len(queue.waiting))]
    if len(used) == 1:
        _serve(queue, order, 0, used[0], limit, budget_s)
    else:
        _in_threads(queue, order, used, limit, budget_s)
    if queue.error is not None:
        raise queue.error


def _in_threads(queue: _Queue, order: Order, lanes: Sequence[Lane], limit: float, budget_s: float) -> None:
    threads = [
        threading.Thread(target=_serve, args=(queue, order, at, lane, limit, budget_s)) for at, lane in enumerate(lanes)
    ]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except BaseException as error:  # an interrupt: end the workers, then their threads end
        queue.stop(error)
        for lane in lanes:
            lane.end()
        for thread in threads:
            thread.join()
        raise


def _serve(queue: _Queue, order: Order, at: int, lane: Lane, limit: float, budget_s: float) -> None:
    """Lane number `at`: group after group until none is left. What goes wrong with us stops every lane."""
    opened = at in queue.opened
    try:
        while (group := queue.next()) is not None:
            answers, opened = _answered(group, order, lane, opened, limit, budget_s)
            queue.take(answers)
    except BaseException as error:
        queue.stop(error)
    (queue.opened.add if opened else queue.opened.discard)(at)


def _answered(
    group: Group, order: Order, lane: Lane, opened: bool, limit: float, budget_s: float
) -> tuple[list[Answer], bool]:
    """(the answers of one group, whether the lane is still open). A group whose worker is killed is asked again, whole."""
    for _ in range(TRIES):
        if time.monotonic() > limit:
            return _all(group, "timeout", LATE.format(budget_s)), opened
        try:
            if not opened:
                lane.open(order, inspect=False, limit=limit)
                opened = True
            return lane.ask(group, limit), True
        except WorkerLostError:
            opened = False
        except OutOfTimeError:
            return _all(group, "timeout", LATE.format(budget_s)), False
    return _all(group, "crashed", LOST.format(TRIES)), False


def _all(group: Group, outcome: str, message: str) -> list[Answer]:
    return [Answer(*unit, outcome, message) for unit in group.units]
