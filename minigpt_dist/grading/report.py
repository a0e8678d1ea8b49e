"""The report of one submission, schema minigpt-dist-grade/1 (`schema.json`): the one source of every other format.

Owns building it from a run, and writing files whole or not at all. Leaves points to `scoring`, other formats to their modules.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shlex
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import minigpt_dist
from minigpt_dist.grading.answers import clipped
from minigpt_dist.grading.engine import Run
from minigpt_dist.grading.rubric import Item, Rubric
from minigpt_dist.grading.scoring import Result, Scorer, total
from minigpt_dist.grading.submission import Submission

SCHEMA = "minigpt-dist-grade/1"
SCHEMA_FILE = Path(__file__).with_name("schema.json")
EXIT_OF = {"pass": 0, "fail": 1, "infrastructure": 3, "ungradable": 4}


@dataclass(frozen=True)
class Terms:
    """How submissions are graded, the same for all of one command.

    only: ids or groups. reveal: whether reports name the seed. isolation: the mode in force, and notes on what it gives.
    rubric_file: as the command line has it; "" for the default.
    """

    rubric: Rubric
    seed: int
    reveal: bool = True
    only: tuple[str, ...] = ()
    slots: tuple[str, ...] = ()
    isolation: str = "none"
    notes: tuple[str, ...] = ()
    rubric_file: str = ""
    deadline_s: float = 20.0

    @property
    def items(self) -> tuple[Item, ...]:
        """What is asked: of pieces that are asked by name, only those in `slots`, or found by their shape."""
        asked = set(self.slots)
        return tuple(i for i in self.rubric.chosen(self.only) if not i.by_name or i.slots & asked)

    @property
    def commitment(self) -> str:
        """What is published of the seed before it is revealed."""
        return f"sha256:{hashlib.sha256(str(self.seed).encode()).hexdigest()}"


def build(submission: Submission, run: Run, terms: Terms) -> dict[str, Any]:
    """The report as JSON values. An item that has not been asked yet is `not_run`."""
    results = _results(run, terms)
    score, most = total(results)
    verdict, message = _verdict(run, results, most)
    return {
        "schema": SCHEMA,
        "suite": {
            "version": minigpt_dist.__version__,
            "rubric": terms.rubric.title,
            "rubric_sha256": terms.rubric.sha256,
            "rubric_total": terms.rubric.total,
        },
        "submission": {
            "name": submission.name,
            "path": _utf8(submission.given),
            "sha256": submission.sha256,
            "entry": _utf8(submission.entry),
            "shape": run.offer.shape,
            "pieces": sorted(run.offer.names),
            "borrowed": dict(run.offer.borrowed),
            "stood_in": list(run.offer.stood_in),
        },
        "environment": _environment(terms),
        "score": None if verdict == "infrastructure" else score,
        "max_score": most,
        "verdict": verdict,
        "message": message,
        "duration_s": round(run.seconds, 3),
        "items": [_row(results[i.id], submission, terms) for i in terms.items],
    }


def _before_an_answer(item: Item, run: Run, terms: Terms) -> Result:
    """An item of a submission of which nothing is known; what is asked only where it is found is no part of the maximum yet."""
    if item.optional and not item.slots & set(terms.slots):
        return Result(item, "excused", message=f"not asked: no piece of {', '.join(sorted(item.slots))} was found")
    return (
        Result(item, "skipped", message="skipped: the submission cannot be graded")
        if run.error
        else Result(item, "not_run")
    )


def _results(run: Run, terms: Terms) -> dict[str, Result]:
    if run.error or (not run.offer.names and not run.finished):
        return {i.id: _before_an_answer(i, run, terms) for i in terms.items}
    found = Scorer(terms.rubric, run.offer).results(run.answers)
    return {i.id: found[i.id] for i in terms.items}


def _verdict(run: Run, results: dict[str, Result], most: float) -> tuple[str, str]:
    if run.error:
        return "ungradable", clipped(run.error)
    if run.broken:
        return "infrastructure", clipped(run.broken)
    if not run.finished or any(r.outcome == "not_run" for r in results.values()):
        return "infrastructure", "grading has not finished"
    asked = [r for r in results.values() if r.outcome != "excused"]
    if not asked:
        return "ungradable", "none of the items asked can be put to this submission"
    lost = [r for r in asked if r.outcome != "passed"]
    if not lost:
        return "pass", "every item that was asked holds"
    return "fail", f"{len(lost)} of {len(asked)} items lost points"


def _environment(terms: Terms) -> dict[str, Any]:
    found = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1),
        "isolation": terms.isolation,
        "isolation_notes": list(terms.notes),
        "seed_commitment": terms.commitment,
    }
    return found | ({"seed": terms.seed} if terms.reveal else {})


def _row(result: Result, submission: Submission, terms: Terms) -> dict[str, Any]:
    item = result.item
    return {
        "id": item.id,
        "number": terms.rubric.number(item.id),
        "title": item.title,
        "group": item.group,
        "lesson": item.lesson,
        "points": result.points,
        "max_points": result.most,
        "worth": item.points,
        "outcome": result.outcome,
        "visibility": item.visibility,
        "requires": list(item.requires),
        "checks": list(item.checks),
        "world_sizes": list(item.world_sizes),
        "duration_s": round(result.seconds, 3),
        "message": result.message,
        "hint": "" if result.outcome in ("passed", "not_run", "excused") else item.hint,
        "evidence": result.evidence,
        "reproduce": reproduce(item.id, submission, terms),
    }


def reproduce(id: str, submission: Submission, terms: Terms) -> str:
    """The command line that asks this item again, of the same seed where that may be known."""
    words = ["minigpt-dist", "grade", submission.given, "--only", id]
    words += ["--slots", ",".join(terms.slots)] if terms.slots else []
    words += ["--rubric", terms.rubric_file] if terms.rubric_file else []
    words += ["--isolation", terms.isolation, *(["--seed", str(terms.seed)] if terms.reveal else [])]
    return _utf8(shlex.join(words))


def _utf8(path: str) -> str:
    """A path as text that can be written, whatever bytes are in it."""
    return path.encode("utf-8", "replace").decode("utf-8")


def summary(report: dict[str, Any]) -> str:
    """`17.5 of 20`, or why there is no score."""
    if report["verdict"] in ("ungradable", "infrastructure"):
        return f"{report['verdict']}: {report['message']}"
    return f"{report['score']:g} of {report['max_score']:g}"


def write(path: Path, content: str) -> None:
    """Put a file in place of an older one at once: a reader sees all of one or all of the other."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(content)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def to_json(value: Any) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
