"""`minigpt-dist bench`: our pieces beside their rivals, measured in turns, and the goals that are set for them.

Owns the options, how many rounds each measurement has, and the tables. Leaves measuring to `bench/`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minigpt_dist.cli import profiling
from minigpt_dist.cli.train import launched_ranks
from minigpt_dist.cli.usage import EXIT_OK, EXIT_VIOLATED, UsageError, number, one_of, seconds, whole
from minigpt_dist.launch.client import prepare
from minigpt_dist.require import require_count

if TYPE_CHECKING:
    from rich.console import Console

    from minigpt_dist.bench.comparison import Comparison

NAME = "bench"
HELP = "measure steps, checkpoints and launches beside their rivals, as ratios"
KINDS = ("step", "ddp", "zero", "layouts", "recompute", "guard", "collectives", "checkpoint", "launch", "all")
SIZES = ("tiny", "medium")
ROUNDS = {"tiny": 20, "medium": 10, "collectives": 10, "checkpoint": 8, "launch": 30}
REDUCED_ROUNDS = {"tiny": 8, "medium": 4, "collectives": 4, "checkpoint": 4, "launch": 10}  # of `bench all`
STEPS = {"tiny": 10, "medium": 1}  # a turn
WORLD_SIZE, MEGABYTES, DEADLINE_S = 4, 400, 600.0
NOTE = "Ratios travel to other machines, milliseconds do not."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("what", nargs="?", default="all", metavar="WHAT", help=f"{', '.join(KINDS)} at fewer rounds (all)")
    add(
        "--size",
        default="tiny",
        metavar="SIZE",
        help=f"step, ddp, zero, layouts, recompute, guard: the model, {' or '.join(SIZES)} (tiny)",
    )
    add("--megabytes", type=whole("megabytes"), default=MEGABYTES, metavar="N", help=f"checkpoint: 10^6 ({MEGABYTES})")
    add("--dir", type=Path, metavar="DIR", help="checkpoint: the disk to write to (temporary files)")
    add("--world-size", type=whole("world_size"), default=WORLD_SIZE, metavar="N", help=f"ranks ({WORLD_SIZE})")
    add("--rounds", type=whole("rounds"), metavar="N", help="in each, every variant has a turn (by kind)")
    add("--steps", type=whole("steps"), metavar="N", help="step: a turn (by size)")
    add("--json", type=Path, metavar="FILE", help="also write every round's seconds here, or the profile")
    add("--strict", action="store_true", help="exit 1 if a goal is missed")
    add("--profile", action="store_true", help="instead: the figures of one training run of --size")
    add(
        "--goals",
        type=Path,
        metavar="FILE",
        help="profile: TOML, [goals] with a line a figure; exit 1 if one is missed",
    )
    price = "profile: of all devices together, in any currency"
    add("--price-per-hour", type=number("price_per_hour"), metavar="X", help=price)
    deadline = f"seconds a measurement may take ({DEADLINE_S:g})"
    add("--deadline", type=number("deadline"), default=DEADLINE_S, metavar="S", help=deadline)


def run(args: argparse.Namespace) -> int:
    """Measure and print; 0, or with --strict 1 if a goal is missed."""
    _check(args)
    goals = profiling.goals_of(args) if args.profile else {}
    prepare()
    if args.profile:
        return profiling.run(args, goals)
    from minigpt_dist.bench.machine import machine
    from minigpt_dist.cli.report import console as new_console

    console, here, found = new_console(), machine(), []
    _print_machine(console, here)
    with tempfile.TemporaryDirectory(prefix="minigpt-dist-", dir=args.dir) as folder:
        for measure in _measurements(args, Path(folder)):
            with console.status("measuring"):
                measured = measure()
            for each in measured if isinstance(measured, list) else [measured]:
                _print_comparison(console, each)
                found.append(each)
    if args.json is not None:
        text = json.dumps({"machine": here, "comparisons": [each.to_dict() for each in found]}, indent=1)
        args.json.write_text(text + "\n", encoding="utf-8")
    return EXIT_VIOLATED if args.strict and any(each.missed for each in found) else EXIT_OK


def _check(args: argparse.Namespace) -> None:
    one_of("what", args.what, KINDS)
    profiling.check(args)
    one_of("size", args.size, SIZES)
    seconds("deadline", args.deadline)
    try:
        for name in ("world_size", "megabytes", "rounds", "steps"):
            if getattr(args, name) is not None:
                require_count(name, getattr(args, name))
    except ValueError as error:
        raise UsageError(str(error)) from None
    if args.dir is not None and not args.dir.is_dir():
        raise UsageError(f"dir is {str(args.dir)!r}, but should be a folder")
    if args.json is not None and (args.json.is_dir() or not args.json.parent.is_dir()):
        raise UsageError(f"json is {str(args.json)!r}, but should be a file in a folder that is there")
    if launched_ranks() is not None:
        raise UsageError("bench is one of a launcher's ranks, but should be started alone: it starts ranks itself")


def _measurements(args: argparse.Namespace, folder: Path) -> Iterator[Callable[[], Comparison | list[Comparison]]]:
    """What was asked for, each to be called in its turn."""
    from minigpt_dist.bench.checkpoint import compare_checkpoints
    from minigpt_dist.bench.collectives import BYTES, compare_all_reduces
    from minigpt_dist.bench.data_parallel import compare_data_parallel
    from minigpt_dist.bench.guard import compare_guard
    from minigpt_dist.bench.launch import compare_launches
    from minigpt_dist.bench.layouts import compare_layouts
    from minigpt_dist.bench.recompute import compare_recompute
    from minigpt_dist.bench.step import compare_steps
    from minigpt_dist.bench.zero import compare_stages

    usual = REDUCED_ROUNDS if args.what == "all" else ROUNDS
    rounds = {kind: args.rounds or usual[kind] for kind in usual}
    N, deadline_s = args.world_size, args.deadline
    if args.what in ("step", "all"):
        for size in SIZES if args.what == "all" else (args.size,):
            yield partial(compare_steps, size, N, rounds[size], args.steps or STEPS[size], deadline_s)
    if args.what in ("ddp", "all"):
        size = "medium" if args.what == "all" else args.size
        yield partial(compare_data_parallel, size, N, rounds[size], args.steps or STEPS[size], deadline_s)
    if args.what in ("zero", "all"):
        size = "medium" if args.what == "all" else args.size
        yield partial(compare_stages, size, N, rounds[size], args.steps or STEPS[size], deadline_s)
    if args.what in ("layouts", "all"):
        size = "medium" if args.what == "all" else args.size
        yield partial(compare_layouts, size, N, rounds[size], args.steps or STEPS[size], deadline_s)
    if args.what in ("recompute", "all"):
        size = "medium" if args.what == "all" else args.size
        yield partial(compare_recompute, size, N, rounds[size], args.steps or STEPS[size], deadline_s)
    if args.what in ("guard", "all"):
        size = "medium" if args.what == "all" else args.size
        yield partial(compare_guard, size, N, rounds[size], args.steps or STEPS[size], deadline_s)
    if args.what in ("collectives", "all"):
        for nbytes in BYTES:
            yield partial(compare_all_reduces, nbytes, N, rounds["collectives"], deadline_s)
    if args.what in ("checkpoint", "all"):
        yield partial(compare_checkpoints, folder, args.megabytes, N, rounds["checkpoint"], deadline_s)
    if args.what in ("launch", "all"):
        yield partial(compare_launches, N, rounds["launch"], deadline_s)


def _print_machine(console: Console, here: dict[str, Any]) -> None:
    from minigpt_dist.cli.report import say

    load = "" if here["load"] is None else f", load {here['load']:.1f}"
    versions = f"torch {here['torch']}, Python {here['python']} on {here['system']}"
    say(console, f"{here['cores']} cores{load}; {versions}; one thread a rank. {NOTE}")


def _print_comparison(console: Console, found: Comparison) -> None:
    """A row a variant: median and range, and where it has a goal, whether it is reached."""
    from minigpt_dist.cli.report import say, table

    say(console, f"\n{found.title}", "bold")
    made = table(
        console, "variant", "ms, median", "min", "max", *(["ours / it"] if found.ours else []), "goal", "", left=1
    )
    made.columns[-1].justify = "left"
    for variant, times in found.seconds.items():
        ratio = found.ratio(variant)
        cells = [f"{1e3 * value:.1f}" for value in (found.median(variant), min(times), max(times))]
        cells += ["" if ratio is None else f"{ratio:.{2 if ratio > 0.1 else 4}f}"] if found.ours else []
        made.add_row(variant, *cells, _goal(found, variant), _mark(found.met(variant)))
    console.print(made)


def _goal(found: Comparison, variant: str) -> str:
    if variant in found.goals:
        return f"<= {found.goals[variant]:g}"
    return f"<= {1e3 * found.limits[variant]:g} ms" if variant in found.limits else ""


def _mark(met: bool | None) -> str:
    return "" if met is None else "[green]met[/]" if met else "[bold red]missed[/]"
