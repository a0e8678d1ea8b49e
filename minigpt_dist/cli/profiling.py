"""`minigpt-dist bench --profile`: one run's figures beside the goals that were set for it.

Owns the options' checks and the table. Leaves the figures to `bench/profile.py`, the goals' file to `bench/goals.py`.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from minigpt_dist.bench.goals import FIGURES, WARM_UP, met, read_goals
from minigpt_dist.cli.usage import EXIT_OK, EXIT_VIOLATED, UsageError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

STEPS = {"tiny": 100, "medium": 20}


def check(args: argparse.Namespace) -> None:
    """Raise UsageError for options that make no sense together."""
    for name in ("goals", "price_per_hour"):
        if getattr(args, name) is not None and not args.profile:
            raise UsageError(f"{name} is given, but should be only with --profile")
    if args.price_per_hour is not None and not 0 <= args.price_per_hour < math.inf:
        raise UsageError(f"price_per_hour is {args.price_per_hour!r}, but should be a finite number of at least 0")
    if args.profile and args.what != "all":
        raise UsageError(f"what is {args.what!r}, but should not be given with --profile")


def goals_of(args: argparse.Namespace) -> dict[str, float]:
    """The goals that the options name; none where there is no file. UsageError for what is wrong with them, or with the steps."""
    steps = _steps(args)
    if steps <= WARM_UP:
        raise UsageError(f"steps is {steps}, but should be above {WARM_UP}, which warm up")
    if args.goals is None:
        return {}
    try:
        goals = read_goals(args.goals)
    except OSError as error:
        raise UsageError(f"goals is {str(args.goals)!r} ({error.strerror}), but should be a readable file") from None
    except ValueError as error:
        raise UsageError(str(error)) from None
    if "price_per_million_tokens" in goals and args.price_per_hour is None:
        raise UsageError("price_per_hour is not given, but should be, as there is a goal for the price of tokens")
    return goals


def _steps(args: argparse.Namespace) -> int:
    steps: int = STEPS[args.size] if args.steps is None else args.steps
    return steps


def run(args: argparse.Namespace, goals: Mapping[str, float]) -> int:
    """Train, print the figures; 0, or 1 if a goal is missed."""
    from minigpt_dist.bench.machine import machine
    from minigpt_dist.bench.profile import profile_of, train_profiled
    from minigpt_dist.cli.report import console as new_console
    from minigpt_dist.cli.report import say

    console, here, steps = new_console(), machine(), _steps(args)
    with console.status("training"):
        figures = profile_of(train_profiled(args.size, args.world_size, steps, args.deadline), args.price_per_hour)
    missed = [name for name, goal in goals.items() if not met(name, figures[name], goal)]
    say(console, f"Profile of {steps} steps, {args.size} model, {args.world_size} ranks on {here['cores']} cores")
    console.print(_table(console, figures, goals, missed))
    if args.json is not None:
        text = json.dumps({"machine": here, "figures": figures, "goals": goals, "missed": missed}, indent=1)
        args.json.write_text(text + "\n", encoding="utf-8")
    return EXIT_VIOLATED if missed else EXIT_OK


def _table(console: Console, figures: Mapping[str, float], goals: Mapping[str, float], missed: Sequence[str]) -> Table:
    from minigpt_dist.cli.report import table

    made = table(console, "figure", "name in a goals file", "measured", "goal", "", left=2)
    made.columns[-1].justify = "left"
    for figure in (figure for figure in FIGURES if figure.name in figures):
        goal, mark = "", ""
        if figure.name in goals:
            goal = f"{'<=' if figure.most else '>='} {_number(goals[figure.name])}"
            mark = "[bold red]missed[/]" if figure.name in missed else "[green]met[/]"
        made.add_row(figure.words, figure.name, _number(figures[figure.name]), goal, mark)
    return made


def _number(value: float) -> str:
    """Whole above a hundred, else four figures."""
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.4g}"
