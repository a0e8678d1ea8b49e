"""`minigpt-dist faults`: run the fault catalogue against the checks, and print who caught what, where, in how long.

Owns the options and the tables. Leaves judging to `verify/matrix.py`.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from minigpt_dist.cli.usage import EXIT_OK, EXIT_VIOLATED, UsageError, number, seconds, whole
from minigpt_dist.launch.client import prepare

if TYPE_CHECKING:
    from rich.console import Console

    from minigpt_dist.verify.checks import Verdict
    from minigpt_dist.verify.faults import Fault
    from minigpt_dist.verify.matrix import Outcome

NAME = "faults"
HELP = "run the fault catalogue against the checks and print the kill matrix"
DEADLINE_S = 60.0
REPEAT = 12
MARKS = {"caught": "X", "passed": ".", "not judged": "-", "not asked": " "}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("names", nargs="*", metavar="NAME", help="faults, or files of the catalogue (all)")
    extent = parser.add_mutually_exclusive_group()
    extent.add_argument("--quick", action="store_true", help="ask each fault only the check that must catch it")
    extent.add_argument(
        "--all", action="store_true", help="ask also runs of the whole composition (where faults are named, always)"
    )
    add("--world-size", type=whole("world_size"), default=0, metavar="N", help="ranks (each fault's own)")
    add("--grid", action="store_true", help="also print fault x check, a mark for each pair")
    add("--list", action="store_true", help="list the faults and what each is")
    add("--variants", action="store_true", help="judge the correct variants instead, and count false alarms")
    add(
        "--repeat",
        type=whole("repeat"),
        default=REPEAT,
        metavar="K",
        help=f"with --variants: runs of each, of other values, at world sizes 2, 3, 4, 1 in turn ({REPEAT})",
    )
    add(
        "--deadline",
        type=number("deadline"),
        default=DEADLINE_S,
        metavar="S",
        help=f"seconds a run may take ({DEADLINE_S:g})",
    )


def run(args: argparse.Namespace) -> int:
    """Judge the faults and print; 0 if all were caught as their entries promise, 1 if not."""
    seconds("deadline", args.deadline)
    if args.world_size < 0:
        raise UsageError(f"world_size is {args.world_size}, but should be a whole number of at least 1")
    if not args.list:
        prepare()
    if args.variants:
        return _run_variants(args)
    from minigpt_dist.cli.report import console as new_console
    from minigpt_dist.verify import matrix

    try:
        faults = matrix.chosen(args.names)
    except ValueError as error:
        raise UsageError(str(error)) from None
    console = new_console()
    if args.list:
        return _print_list(console, faults)
    extent: matrix.Extent = "quick" if args.quick else "all" if args.all or args.names else "pieces"
    start = time.perf_counter()
    judge = functools.partial(matrix.judge_fault, world_size=args.world_size, extent=extent, deadline_s=args.deadline)
    outcomes = list(_shown(console, matrix.judge_all(faults, judge), len(faults)))
    _print_outcomes(console, outcomes)
    if args.grid:
        _print_grid(console, outcomes)
    return _print_end(
        console, outcomes, everything=not args.names and not args.quick, took_s=time.perf_counter() - start
    )


def _run_variants(args: argparse.Namespace) -> int:
    """Judge correct variants and print what was said against them; 0 if nothing was."""
    from minigpt_dist.cli.report import console as new_console
    from minigpt_dist.cli.report import say, table
    from minigpt_dist.verify import false_alarms
    from minigpt_dist.verify.faults.variants import VARIANTS

    try:
        chosen = false_alarms.runs(args.names, max(args.repeat, 1))
    except ValueError as error:
        raise UsageError(str(error)) from None
    console = new_console()
    if args.list:
        for name in dict.fromkeys(run.variant for run in chosen):
            say(console, f"{name}: {(VARIANTS[name].__doc__ or '').strip().splitlines()[0]}")
        return EXIT_OK
    start, found = time.perf_counter(), list(false_alarms.judged(chosen, whole=args.all, workers=2))
    made = table(console, "variant", "runs", "verdicts", "passed", "not judged", "false alarms", left=1)
    for name in dict.fromkeys(run.variant for run in chosen):
        mine = [v for run, verdicts in found if run.variant == name for v in verdicts]
        counts = (
            sum(v.passed for v in mine),
            sum(bool(v.not_judged) for v in mine),
            sum(bool(v.violations) for v in mine),
        )
        made.add_row(name, str(sum(run.variant == name for run in chosen)), str(len(mine)), *map(str, counts))
    console.print(made)
    alarms = [v.render(f"variant:{run.variant}") for run, verdicts in found for v in verdicts if v.violations]
    for alarm in alarms:
        say(console, "\n" + alarm)
    verdicts = sum(len(verdicts) for _, verdicts in found)
    took_s = time.perf_counter() - start
    say(console, f"\n{len(alarms)} false alarms in {len(found)} runs, {verdicts} verdicts; {took_s:.0f} s", "bold")
    return EXIT_VIOLATED if alarms else EXIT_OK


def _print_list(console: Console, faults: Sequence[Fault]) -> int:
    """Name, sentence, source, condition and check of each fault."""
    from minigpt_dist.cli.report import table

    made = table(console, "fault", "what is wrong", "shows with", "check", "reported in", left=5)
    for fault in faults:
        made.add_row(fault.name, fault.sentence, fault.needs, fault.check, fault.source)
    console.print(made, markup=False)
    return EXIT_OK


def _shown(console: Console, outcomes: Iterable[Outcome], total: int) -> Iterator[Outcome]:
    """Pass outcomes on; on a terminal, say how many are done."""
    if not console.is_terminal:
        yield from outcomes
        return
    with console.status("") as status:
        for done, outcome in enumerate(outcomes, start=1):
            status.update(f"{outcome.fault.name} ({done} of {total} done)")
            yield outcome


def _print_outcomes(console: Console, outcomes: Sequence[Outcome]) -> None:
    """A line a fault: who caught it first, what the check that ought to named, how many checks failed of those asked, seconds."""
    from minigpt_dist.cli.report import table

    made = table(
        console, "fault", "N", "first caught by", "stage", "step", "rank", "tensor", "failed/asked", "s", "", left=1
    )
    for o in outcomes:
        first = o.caught_by[0].check if o.caught_by else "nobody"
        named = o.named
        place = (
            [str(x) if x is not None else "" for x in (named.stage, named.step, named.rank, named.tensor)]
            if named
            else [""] * 4
        )
        made.add_row(
            o.fault.name,
            str(o.world_size),
            first,
            *place,
            f"{len(o.caught_by)}/{len(o.verdicts)}",
            f"{sum(o.seconds):.1f}",
            o.complaint or (o.equivalent and f"equivalent here: {o.equivalent}"),
        )
    for column in (2, 3, 6, 9):
        made.columns[column].justify = "left"
    console.print(made, markup=False)


def _print_grid(console: Console, outcomes: Sequence[Outcome]) -> None:
    """Fault x check, a mark each, the checks numbered from the left."""
    from minigpt_dist.cli.report import say

    asked = list(dict.fromkeys(v.check for o in outcomes for v in o.verdicts))
    say(
        console, "\n" + ", ".join(f"{mark} {what}" if mark.strip() else f"blank {what}" for what, mark in MARKS.items())
    )
    for i, name in enumerate(asked, start=1):
        say(console, f"{i:4d} {name}")
    width = max(len(o.fault.name) for o in outcomes)
    for o in outcomes:
        found = {v.check: v for v in o.verdicts}
        say(console, f"{o.fault.name:<{width}} {''.join(_mark(found.get(name)) for name in asked)}")


def _mark(verdict: Verdict | None) -> str:
    if verdict is None:
        return MARKS["not asked"]
    return MARKS["caught" if verdict.violations else "not judged" if verdict.not_judged else "passed"]


def _print_end(console: Console, outcomes: Sequence[Outcome], *, everything: bool, took_s: float) -> int:
    """How many were caught and located, which checks nobody needs; 1 if a fault survived or a promise was broken."""
    from minigpt_dist.cli.report import say
    from minigpt_dist.verify.matrix import unneeded

    visible = [o for o in outcomes if not o.equivalent]
    caught, staged = sum(o.named is not None for o in visible), sum(o.stage_right for o in visible)
    located = sum(o.located for o in visible)
    share = 100 / max(len(visible), 1)
    if everything:
        say(console, f"\nchecks that no fault needs: {', '.join(unneeded(outcomes)) or 'none'}")
    say(
        console,
        f"\n{caught} of {len(visible)} faults caught by the check that ought to; stage right {staged * share:.0f} %, "
        f"stage, step, rank and tensor right {located * share:.0f} %; {len(outcomes) - len(visible)} equivalent here; {took_s:.0f} s",
        "bold",
    )
    return EXIT_OK if all(o.as_promised for o in outcomes) else EXIT_VIOLATED
