"""`minigpt-dist memory-table`: what data parallelism and each stage of ZeRO hold a parameter, predicted, and measured on ranks here.

Owns the table and its verdict. Leaves the formula to `memory`, and the measurement to `bench/states`.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from minigpt_dist.cli.train import launched_ranks
from minigpt_dist.cli.usage import EXIT_OK, EXIT_VIOLATED, UsageError, number, seconds, sizes
from minigpt_dist.launch.client import prepare

if TYPE_CHECKING:
    from rich.console import Console

    from minigpt_dist.bench.states import Measured

NAME = "memory-table"
HELP = "bytes a parameter of DDP and ZeRO stages 1, 2, 3: predicted for 1 to 64 ranks, measured for 1 to 8"
WORLD_SIZES, PREDICTED, DEADLINE_S = (1, 2, 3, 4, 5, 6, 7, 8), (16, 32, 64), 120.0
COLUMNS = ("DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3")
WORDS = {"float32": "float32", "bfloat16": "bfloat16, with a float32 master copy"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    usual = ",".join(map(str, WORLD_SIZES))
    add("--world-sizes", type=sizes("world_sizes"), default=WORLD_SIZES, metavar="N,N", help=f"to measure ({usual})")
    deadline = f"seconds a measurement may take ({DEADLINE_S:g})"
    add("--deadline", type=number("deadline"), default=DEADLINE_S, metavar="S", help=deadline)


def run(args: argparse.Namespace) -> int:
    """Measure and print; 0 if what is held is what is predicted, up to padding, else 1."""
    seconds("deadline", args.deadline)
    if launched_ranks() is not None:
        raise UsageError(
            "memory-table is one of a launcher's ranks, but should be started alone: it starts ranks itself"
        )
    prepare()
    from minigpt_dist.bench.states import measure_states
    from minigpt_dist.cli.report import console as new_console

    console = new_console()
    with console.status("measuring"):
        found = {N: measure_states(N, args.deadline) for N in sorted(set(args.world_sizes))}
    return EXIT_OK if all([_print_table(console, dtype, found) for dtype in WORDS]) else EXIT_VIOLATED  # noqa: C419 - all are printed


def _print_table(console: Console, dtype: str, found: dict[int, Measured]) -> bool:
    """A row a world size: predicted, and what was measured. Is it the same, up to padding?"""
    from minigpt_dist.bench.states import NUMEL, STAGES, unlike
    from minigpt_dist.cli.report import say, table
    from minigpt_dist.memory import state_bytes

    say(
        console,
        f"\nBytes a parameter and rank between backward and step, {WORDS[dtype]}: predicted, (measured)",
        "bold",
    )
    made, good = table(console, "ranks", *COLUMNS, left=1), True
    for N in (*found, *(N for N in PREDICTED if N not in found)):
        cells = [f"{sum(state_bytes(stage, dtype, N).values()):.2f}" for stage in STAGES]
        for stage in STAGES if N in found else ():
            held = found[N][dtype][stage]
            wrong = unlike(held, stage, dtype, N)
            good = good and not wrong
            cells[stage] += f" [bold red]({held / NUMEL:.2f})[/]" if wrong else f" ({held / NUMEL:.2f})"
        made.add_row(str(N), *cells)
    console.print(made)
    return good
