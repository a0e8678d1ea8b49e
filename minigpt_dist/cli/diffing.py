"""A refactor check from start to exit code: run both sides, print what differs, or find the first revision that does.

Owns the report. Leaves options and revisions to `diff`, runs and comparing to `verify/refactor.py`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager

from rich.console import Console

from minigpt_dist.cli.report import console as new_console
from minigpt_dist.cli.report import say
from minigpt_dist.cli.usage import EXIT_OK, EXIT_VIOLATED, UsageError
from minigpt_dist.config import TrainConfig
from minigpt_dist.verify.refactor import Outcome, cases, first_bad
from minigpt_dist.verify.refactor import outcome as compared
from minigpt_dist.verify.refactor_run import NoImplementationError, Ran, Sides
from minigpt_dist.verify.sides import Side

At = Callable[[str], AbstractContextManager[Side]]


@contextmanager
def _bar(console: Console, what: str, total: int) -> Iterator[Callable[[int], object]]:
    """A bar where stdout is a terminal; nothing elsewhere. Gives what to call with the number done."""
    if not console.is_terminal:
        yield lambda done: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    with Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.update(task, completed=done)


def chosen_cases(args: argparse.Namespace) -> dict[str, TrainConfig]:
    """The cases asked for. UsageError if there is none of that name."""
    found = cases(args.world_sizes, args.seed)
    chosen = {name: c for name, c in found.items() if not args.only or any(word in name for word in args.only)}
    if not chosen:
        raise UsageError(f"only is {','.join(args.only)!r}, but should be a part of one of: {'; '.join(found)}")
    return chosen


@contextmanager
def _ran(
    console: Console, start: Sides, sides: Sequence[Side], chosen: dict[str, TrainConfig], args: argparse.Namespace
) -> Iterator[list[Ran]]:
    """Sides that have run over the cases. UsageError for one without an implementation."""
    try:
        with ExitStack() as stack:
            with _bar(console, " and ".join(side.label for side in sides), len(sides) * len(chosen)) as tell:
                limits = {"deadline_s": args.deadline, "oracle": args.within_oracle}
                done = stack.enter_context(start.ran(sides, chosen, tell=tell, **limits))
            yield done
    except NoImplementationError as error:
        raise UsageError(str(error)) from error


def is_bad(found: Outcome, within_oracle: bool) -> bool:
    """Does the outcome count against the change?"""
    return bool(found.wrong) if within_oracle else found.difference is not None


def compare_sides(base: Side, head: Side, args: argparse.Namespace) -> int:
    """Compare and print."""
    console, chosen = new_console(), chosen_cases(args)
    with Sides() as start, _ran(console, start, [base, head], chosen, args) as (before, after):
        found = [compared(name, config, before, after) for name, config in chosen.items()]
    for outcome in found:
        say(console, f"{outcome.case}: {_word(outcome, args.within_oracle)}")
    differing = [o for o in found if o.difference is not None]
    bad = [o for o in found if is_bad(o, args.within_oracle)]
    shown = (bad or differing)[:1]
    for outcome in shown:
        _print_difference(console, outcome, base, head)
    say(console, _verdict(base, head, found, differing, bad), "bold")
    return EXIT_VIOLATED if bad else EXIT_OK


def _word(outcome: Outcome, within_oracle: bool) -> str:
    if outcome.skipped:
        return f"not compared ({outcome.skipped})"
    if outcome.difference is None:
        return "identical"
    if not within_oracle:
        return "different"
    return "wrong" if outcome.wrong else "bits differ, both correct"


def _print_difference(console: Console, outcome: Outcome, base: Side, head: Side) -> None:
    assert outcome.difference is not None
    say(
        console,
        f"\n{outcome.case}: {head.label} (observed) against {base.label} (expected)\n{outcome.difference.render()}",
    )
    for label, beyond in outcome.wrong:
        if beyond is not outcome.difference:
            say(console, f"\n{label} is not correct within rounding:\n{beyond.render()}")
    say(console, "")


def _verdict(
    base: Side, head: Side, found: Sequence[Outcome], differing: Sequence[Outcome], bad: Sequence[Outcome]
) -> str:
    compared = [o for o in found if not o.skipped]
    what = "tokens, logits, gradients, optimizer state, parameters, checkpoint and resume"
    over = f"{len(compared)} case{'s' * (len(compared) != 1)} ({what} at every step and rank)"
    if bad:
        return f"different: {len(bad)} of {over}"
    if differing:
        return f"bits differ, both correct: {len(differing)} of {over}"
    return f"identical: {head.label} and {base.label}, every bit of {over}"


def bisect(at: At, good: str, commits: Sequence[str], args: argparse.Namespace) -> int:
    """Find the first of `commits` (oldest first) that differs from `good`, or that the oracle finds wrong, and print it."""
    console, chosen = new_console(), chosen_cases(args)
    seen: dict[str, list[Outcome]] = {}
    with Sides() as start, at(good) as base, _ran(console, start, [base], chosen, args) as (before,):

        def bad(commit: str) -> bool:
            with at(commit) as head, _ran(console, start, [head], chosen, args) as (after,):
                found = [compared(name, config, before, after) for name, config in chosen.items()]
            seen[commit] = [o for o in found if is_bad(o, args.within_oracle)]
            say(console, f"{head.label}: {'bad' if seen[commit] else 'good'}")
            return bool(seen[commit])

        if not bad(commits[-1]):
            say(console, f"nothing to find: no case of the last revision differs from {base.label}", "bold")
            return EXIT_OK
        telling = seen[commits[-1]][0].case
        chosen = {telling: chosen[telling]}  # one case that shows it is enough to search with
        culprit = first_bad(commits, bad)
    with at(culprit) as head:
        _print_difference(console, seen[culprit][0], base, head)
        say(console, f"first bad revision: {head.label} ({culprit})", "bold")
    return EXIT_VIOLATED
