"""`minigpt-dist ddp`: our data-parallel wrapper, torch's, and one process on the whole batch, step by step.

Owns the options and the table. Leaves the run to `bench/agreement.py`.
"""

from __future__ import annotations

import argparse
import math

from minigpt_dist.cli.train import launched_ranks
from minigpt_dist.cli.usage import EXIT_OK, EXIT_VIOLATED, UsageError, number, one_of, seconds, whole
from minigpt_dist.launch.client import prepare
from minigpt_dist.require import require_count

NAME = "ddp"
HELP = "train with our data-parallel wrapper, torch's and one process; show losses and differences step by step"
TYPES, DEADLINE_S, BUCKET_MB = ("float32", "float64"), 120.0, 0.03


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--world-size", type=whole("world_size"), default=4, metavar="N", help="ranks (4)")
    add("--steps", type=whole("steps"), default=10, metavar="N", help="updates (10)")
    add("--dtype", default="float32", metavar="TYPE", help=f"{', '.join(TYPES)} (float32)")
    add(
        "--bucket-mb",
        type=number("bucket_mb"),
        default=BUCKET_MB,
        metavar="X",
        help=f"MiB a message ({BUCKET_MB:g}: 4)",
    )
    deadline = f"seconds the run may take ({DEADLINE_S:g})"
    add("--deadline", type=number("deadline"), default=DEADLINE_S, metavar="S", help=deadline)


def run(args: argparse.Namespace) -> int:
    """Train and print; 0, or 1 where parameters are further apart than rounding explains."""
    _check(args)
    prepare()
    from minigpt_dist.bench.agreement import BOUNDS, compare
    from minigpt_dist.cli.report import console, say, table

    rows, bound = compare(args.world_size, args.steps, args.dtype, args.bucket_mb, args.deadline), BOUNDS[args.dtype]
    out = console()
    say(
        out, f"Data-parallel SGD, {args.world_size} ranks, {args.dtype}: mean loss, largest difference of a parameter\n"
    )
    made = table(out, "step", "ours", "torch DDP", "one process", "ours - one process", "ours - torch DDP")
    for row in rows:
        losses = (f"{loss:.6f}" for loss in (row.ours, row.torchs, row.one_process))
        made.add_row(str(row.step), *losses, f"{row.from_one_process:.1e}", f"{row.from_torchs:.1e}")
    out.print(made)
    apart = [(row.step, d) for row in rows for d in (row.from_one_process, row.from_torchs) if not d <= bound]
    if apart:
        say(
            out, "step {}: parameters are {:.1e} apart, but should be at most {:g}".format(*apart[0], bound), "bold red"
        )
        return EXIT_VIOLATED
    say(out, f"\nthe same parameters at every step, within {bound:g}", "bold green")
    return EXIT_OK


def _check(args: argparse.Namespace) -> None:
    one_of("dtype", args.dtype, TYPES)
    seconds("deadline", args.deadline)
    if not 0 < args.bucket_mb < math.inf:
        raise UsageError(f"bucket_mb is {args.bucket_mb!r}, but should be a positive number")
    if launched_ranks() is not None:
        raise UsageError("ddp is one of a launcher's ranks, but should be started alone: it starts ranks itself")
    try:
        for name in ("world_size", "steps"):
            require_count(name, getattr(args, name))
    except ValueError as error:
        raise UsageError(str(error)) from None
