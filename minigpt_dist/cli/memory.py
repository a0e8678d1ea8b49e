"""`minigpt-dist memory`: bytes by kind of every rank of a ZeRO-1 run, foretold and measured.

Owns the options and the table. Leaves both figures to `bench/memory.py`.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from minigpt_dist.cli.train import launched_ranks
from minigpt_dist.cli.usage import EXIT_OK, EXIT_VIOLATED, UsageError, number, one_of, seconds, whole
from minigpt_dist.config import DTYPES, ModelConfig
from minigpt_dist.launch.client import prepare
from minigpt_dist.require import require_count

if TYPE_CHECKING:
    from rich.console import Console

NAME = "memory"
HELP = "count what every rank of a ZeRO-1 run holds, by kind, beside what the sizes foretell"
SIZES = ("vocab", "embed_dim", "num_heads", "num_layers", "seq_len")
DEADLINE_S = 120.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add, model = parser.add_argument, ModelConfig()
    add("--world-size", type=whole("world_size"), default=4, metavar="N", help="ranks (4)")
    add("--batch", type=whole("batch"), default=4, metavar="N", help="sequences a micro-batch (4)")
    add("--micro-batches", type=whole("micro_batches"), default=1, metavar="N", help="a rank and step (1)")
    add("--dtype", default="float32", metavar="TYPE", help=f"{', '.join(DTYPES)} (float32)")
    for name in SIZES:
        default = getattr(model, name)
        add(f"--{name.replace('_', '-')}", type=whole(name), default=default, metavar="N", help=f"({default})")
    add("--tie-head", action="store_true", help="share the embedding's weight with the head")
    deadline = f"seconds the run may take ({DEADLINE_S:g})"
    add("--deadline", type=number("deadline"), default=DEADLINE_S, metavar="S", help=deadline)


def run(args: argparse.Namespace) -> int:
    """Measure and print; 0, or 1 where a rank holds other bytes than foretold."""
    model = _checked(args)
    prepare()
    from minigpt_dist.bench.memory import measured, predicted
    from minigpt_dist.cli.report import console, say

    wanted = predicted(model, args.world_size, args.batch, args.dtype)
    held = measured(model, args.world_size, args.batch, args.micro_batches, args.dtype, args.deadline)
    out = console()
    ranks = f"{args.world_size} rank{'s' if args.world_size > 1 else ''}, ZeRO-1"
    tokens = f"{args.micro_batches} micro-batch{'es' if args.micro_batches > 1 else ''} of {args.batch} x {model.seq_len} tokens"
    say(out, f"Memory by kind (bytes): {ranks}, P = {model.numel():,} of {args.dtype}, {tokens}")
    _print_table(out, wanted, held)
    wrong = [
        f"rank {rank} holds {counts[kind]:,} bytes of {kind}, but should hold {wanted[kind]:,}"
        for rank, counts in enumerate(held)
        for kind in wanted
        if counts[kind] != wanted[kind]
    ]
    for line in wrong:
        say(out, line, "bold red")
    if not wrong:
        say(out, "\nevery rank holds what was foretold, to the byte", "bold green")
    return EXIT_VIOLATED if wrong else EXIT_OK


def _checked(args: argparse.Namespace) -> ModelConfig:
    """The model. UsageError for what cannot be run."""
    one_of("dtype", args.dtype, DTYPES)
    seconds("deadline", args.deadline)
    if launched_ranks() is not None:
        raise UsageError("memory is one of a launcher's ranks, but should be started alone: it starts ranks itself")
    try:
        for name in ("world_size", "batch", "micro_batches"):
            require_count(name, getattr(args, name))
        return ModelConfig(**{name: getattr(args, name) for name in SIZES}, tie_head=args.tie_head)
    except ValueError as error:
        raise UsageError(str(error)) from None


def _print_table(console: Console, wanted: dict[str, int], held: list[dict[str, int]]) -> None:
    """A row a rank, their largest and mean, and what was foretold of each."""
    from minigpt_dist.cli.report import table

    rows = [*enumerate(held), ("max", {kind: max(counts[kind] for counts in held) for kind in wanted})]
    made = table(console, "rank", *wanted, "in all", left=1)
    for name, counts in rows:
        made.add_row(str(name), *(f"{counts[kind]:,}" for kind in wanted), f"{sum(counts[kind] for kind in wanted):,}")
    means = [sum(counts[kind] for counts in held) / len(held) for kind in wanted]
    made.add_row("mean", *(f"{mean:,.0f}" for mean in means), f"{sum(means):,.0f}")
    made.add_row("foretold", *(f"{size:,}" for size in wanted.values()), f"{sum(wanted.values()):,}", style="bold")
    console.print(made)
