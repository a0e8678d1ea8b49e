"""`minigpt-dist grade`: submissions in, reports out.

Owns the options and their one-line errors. Imports no torch before it has to. Leaves grading to `grading/`, and what is printed to
`marks`.
"""

from __future__ import annotations

import argparse
import os
import secrets
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minigpt_dist.cli.usage import UsageError, names, number, one_of, seconds, whole

if TYPE_CHECKING:
    from minigpt_dist.grading.cohort import Entrant
    from minigpt_dist.grading.report import Terms
    from minigpt_dist.grading.rubric import Rubric

NAME = "grade"
HELP = "grade submissions against a rubric: reports, points, and why they were lost"
ISOLATIONS = ("auto", "bwrap", "namespaces", "uid", "none")
DEADLINE_S, BUDGET_S = 20.0, 600.0
SEED_FILE = ".seed"
MAX_WORKERS = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("paths", nargs="+", metavar="PATH", help="a .py file, a folder, a .zip, a folder or glob of these")
    add("--out", type=Path, metavar="DIR", help="where reports go, a folder for each submission (print only)")
    add("--rubric", metavar="FILE", help="a rubric of your own: `minigpt-dist rubric --out FILE` writes one to edit")
    add("--only", type=names, default=(), metavar="ID,...", help="these items or groups, and what they require")
    add("--slots", type=names, default=(), metavar="A,B", help="only these pieces of a submission, the rest is ours")
    add(
        "--seed",
        type=whole("seed"),
        metavar="N",
        help="for data, weights and scenarios (a secret one, told in the report)",
    )
    add("--keep-seed-secret", action="store_true", help="do not tell the seed in reports, only its sha256")
    add(
        "--isolation",
        default="auto",
        metavar="MODE",
        help=f"one of {', '.join(ISOLATIONS)} (auto: the strongest that works)",
    )
    add("--require-isolation", action="store_true", help="refuse (exit 3) anything weaker than --isolation")
    add("-n", type=whole("n"), dest="workers", metavar="N", help="grading processes; 0: none (one for each core)")
    add(
        "--deadline",
        type=number("deadline"),
        default=DEADLINE_S,
        metavar="S",
        help=f"seconds for one run ({DEADLINE_S:g})",
    )
    add(
        "--budget",
        type=number("budget"),
        default=BUDGET_S,
        metavar="S",
        help=f"seconds for one submission ({BUDGET_S:g})",
    )
    add("--resume", action="store_true", help="take up what an interrupted grading left in --out")
    add("--single", action="store_true", help="each PATH is one submission, whatever lies in it")
    add("--markdown", action="store_true", help="print Markdown in place of the table")


def run(args: argparse.Namespace) -> int:
    """Grade and print; 0 full points, 1 points lost, 3 not graded by our fault, 4 a submission that cannot be graded."""
    _check(args)
    with tempfile.TemporaryDirectory(prefix="minigpt-dist-", ignore_cleanup_errors=True) as scratch:
        found = _entrants(args.paths, Path(scratch), args.single)
        terms = _terms(args)
        from minigpt_dist.cli import marks
        from minigpt_dist.grading.session import Session

        session = Session(terms, args.out, args.budget, args.resume)
        workers = _cores() if args.workers is None else args.workers
        return marks.grade(session, found, workers, markdown=args.markdown)


def _check(args: argparse.Namespace) -> None:
    """UsageError for options that cannot be met."""
    one_of("isolation", args.isolation, ISOLATIONS)
    seconds("deadline", args.deadline)
    seconds("budget", args.budget)
    if args.workers is not None and not 0 <= args.workers <= MAX_WORKERS:
        raise UsageError(f"n is {args.workers}, but should be from 0 to {MAX_WORKERS}")
    if args.seed is not None and args.seed < 0:
        raise UsageError(f"seed is {args.seed}, but should be at least 0")
    if args.resume and args.out is None:
        raise UsageError("resume needs --out DIR, the folder that an interrupted grading wrote to")
    if args.out is not None and args.out.exists() and not args.out.is_dir():
        raise UsageError(f"out is {str(args.out)!r}, which is there and is no folder")


def _entrants(paths: list[str], scratch: Path, single: bool) -> list[Entrant]:
    from minigpt_dist.grading.cohort import entrants

    try:
        return entrants(paths, scratch, single=single)
    except FileNotFoundError as error:
        raise UsageError(f"path is {str(error)!r}, but should be a file or folder that is there") from None
    except ValueError as error:
        raise UsageError(str(error)) from None


def _terms(args: argparse.Namespace) -> Terms:
    """What holds for all submissions. UsageError for a rubric or name that is wrong, LaunchError for isolation that is not to be had."""
    from minigpt_dist.cli.judging import check_slots
    from minigpt_dist.grading.report import Terms
    from minigpt_dist.launch.sandbox import choose

    check_slots(args.slots)
    rubric = _rubric(args)
    isolation = choose(args.isolation, args.require_isolation)
    if isolation.name != args.isolation and (isolation.name == "none" or args.isolation != "auto"):
        why = "; ".join(note for note in isolation.notes if "does not work here" in note)
        print(f"minigpt-dist: warning: submissions run with isolation {isolation.name}: {why}", file=sys.stderr)
    return Terms(
        rubric,
        seed=_seed(args),
        reveal=not args.keep_seed_secret,
        only=args.only,
        slots=args.slots,
        isolation=isolation.name,
        notes=tuple(isolation.notes),
        rubric_file=args.rubric or "",
        deadline_s=args.deadline,
    )


def _rubric(args: argparse.Namespace) -> Rubric:
    from minigpt_dist.grading.rubric import DEFAULT, load
    from minigpt_dist.grading.values import RubricError

    try:
        rubric = load(Path(args.rubric) if args.rubric else DEFAULT)
        asked = rubric.chosen(args.only)
    except RubricError as error:
        raise UsageError(str(error)) from None
    if args.only and all(item.by_name and not item.slots & set(args.slots) for item in asked):
        slots = ",".join(sorted({slot for item in asked for slot in item.slots}))
        raise UsageError(f"only is {args.only[0]!r}, which is asked by name, but should come with --slots {slots}")
    return rubric


def _seed(args: argparse.Namespace) -> int:
    """The seed asked for, or that of the grading taken up, or a new secret one; kept in `--out` for the next time."""
    kept = None if args.out is None else args.out / SEED_FILE
    seed: int | None = args.seed
    if seed is None and kept is not None and args.resume and kept.exists():
        seed = _kept_seed(kept)
    if seed is None:
        seed = secrets.randbits(63)
    if kept is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(kept, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(f"{seed}\n")
    return seed


def _kept_seed(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def worst(reports: list[dict[str, Any]]) -> int:
    """The exit code of several: ours to mend before ungradable before points lost."""
    from minigpt_dist.grading.report import EXIT_OF

    codes = [EXIT_OF[report["verdict"]] for report in reports]
    return next((code for code in (3, 4, 1) if code in codes), 0)
