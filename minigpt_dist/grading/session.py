"""Submission after submission under the same terms, each into its own folder, each safe from the others.

Owns what is kept of an interrupted grading, when files are written, and that a bad submission, or a mistake of ours over one, ends with
it. Leaves grading to `engine`, and who is graded to `cohort`.
"""

from __future__ import annotations

import json
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import minigpt_dist
from minigpt_dist.grading import outputs
from minigpt_dist.grading.cohort import Entrant
from minigpt_dist.grading.crew import Inline, Lane, Process
from minigpt_dist.grading.engine import Run, grade
from minigpt_dist.grading.grader import Order
from minigpt_dist.grading.kept import Kept
from minigpt_dist.grading.plan import merged, plan
from minigpt_dist.grading.report import Terms, build
from minigpt_dist.grading.submission import Submission, opened

Listener = Callable[[str, int, int], None]  # (name, units answered, units in all)


@dataclass
class Session:
    """out: where files go, None for nowhere. budget_s: seconds for one submission. resume: take up what is kept in `out`."""

    terms: Terms
    out: Path | None = None
    budget_s: float = 600.0
    resume: bool = False
    listener: Listener = lambda name, done, total: None
    remark: str = ""

    def grade(self, entrant: Entrant, lanes: Sequence[Lane]) -> dict[str, Any]:
        """The report of one submission. Its files are there from the first moment, and true at every one."""
        with tempfile.TemporaryDirectory(prefix="minigpt-dist-", ignore_cleanup_errors=True) as scratch:
            submission = opened(entrant.name, entrant.path, Path(scratch))
            folder = None if self.out is None else self.out / entrant.name
            done = self._done(folder, submission) if self.resume else None
            return done or self._graded(submission, folder, lanes)

    def _graded(self, submission: Submission, folder: Path | None, lanes: Sequence[Lane]) -> dict[str, Any]:
        run, terms = Run(error=submission.error), self.terms
        kept = Kept(folder, self._header(submission))
        run.answers = kept.load() if self.resume else {}
        kept.begin(run.answers.values())
        units = len(merged(plan(i for i in terms.items if not i.is_contract)))

        def changed() -> None:
            kept.add(run.answers.values())
            self._write(folder, build(submission, run, terms))
            self.listener(submission.name, len(run.answers), units)

        try:
            self._write(folder, build(submission, run, terms))
            if not run.error:
                order = Order(submission.spec, terms.slots, terms.deadline_s, terms.isolation, terms.seed)
                grade(run, order, terms.rubric, terms.items, lanes, budget_s=self.budget_s, changed=changed)
        finally:
            report = build(submission, run, terms)
            if folder is not None:
                self.remark = outputs.write_all(folder, report) or self.remark
        return report

    def _write(self, folder: Path | None, report: dict[str, Any]) -> None:
        if folder is not None:
            outputs.write_running(folder, report)

    def _header(self, submission: Submission) -> dict[str, Any]:
        """What answers hold for."""
        terms = self.terms
        about = {"sha256": submission.sha256, "entry": submission.entry, "slots": terms.slots, "seed": terms.commitment}
        return about | {
            "suite": minigpt_dist.__version__,
            "isolation": terms.isolation,
            "deadline_s": terms.deadline_s,
        }

    def _done(self, folder: Path | None, submission: Submission) -> dict[str, Any] | None:
        """The report in `folder`, if it is finished and would come out the same."""
        try:
            old: dict[str, Any] = json.loads((folder / outputs.REPORT).read_text("utf-8")) if folder else {}
            blank = build(submission, Run(), self.terms)
            parts = ("schema", "suite", "environment")
            same = all(old[p] == blank[p] for p in parts) and old["submission"]["sha256"] == submission.sha256
            ids = [row["id"] for row in old["items"]] == [row["id"] for row in blank["items"]]
            return old if same and ids and old["verdict"] != "infrastructure" else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def grade_all(self, entrants: Sequence[Entrant], workers: int, done: Callable[[dict[str, Any]], None]) -> None:
        """Grade everyone and hand over each report, in the order in which they end; `workers` of them at a time (0: here, in turn).

        One alone has all workers for its groups. KeyboardInterrupt passes through, with every worker ended and every file true.
        """
        lanes: list[Lane] = [Process() for _ in range(workers)] if workers else [Inline()]
        try:
            if len(entrants) == 1 or len(lanes) == 1:
                for entrant in entrants:
                    done(self.grade(entrant, lanes))
            else:
                self._in_threads(entrants, lanes, done)
        finally:
            for lane in lanes:
                lane.close()

    def _in_threads(
        self, entrants: Sequence[Entrant], lanes: Sequence[Lane], done: Callable[[dict[str, Any]], None]
    ) -> None:
        """A thread a lane; each takes the next entrant when it is free."""
        waiting, lock = list(entrants), threading.Lock()

        def serve(lane: Lane) -> None:
            while True:
                with lock:
                    if not waiting:
                        return
                    entrant = waiting.pop(0)
                report = self.grade(entrant, [lane])
                with lock:
                    done(report)

        with ThreadPoolExecutor(len(lanes)) as pool:
            futures = [pool.submit(serve, lane) for lane in lanes]
            try:
                for future in futures:
                    future.result()
            except BaseException:
                with lock:
                    waiting.clear()
                for lane in lanes:
                    lane.end()
                raise
