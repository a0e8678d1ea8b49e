"""`minigpt-dist agree`: our stack beside torch's DDP, ZeroRedundancyOptimizer and FSDP2, and one process: losses, bits, bytes, time.

Owns the options, the table and its verdict. Leaves the runs to `bench/stacks.py`.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from minigpt_dist.cli.bench import SIZES
from minigpt_dist.cli.train import launched_ranks
from minigpt_dist.cli.usage import EXIT_OK, EXIT_VIOLATED, UsageError, number, one_of, seconds, whole
from minigpt_dist.launch.client import prepare
from minigpt_dist.require import require_count

if TYPE_CHECKING:
    from minigpt_dist.bench.stacks import Row

NAME = "agree"
HELP = (
    "train with our stack, torch's DDP, ZeroRedundancyOptimizer and FSDP2; show losses, bits, bytes, time side by side"
)
DEADLINE_S = 300.0
ROUNDS = {"tiny": 8, "medium": 5}
TURN = {"tiny": 10, "medium": 1}  # steps
WORDS = {"ranks": "rank order", "buckets": "gloo's ring, DDP's bucket", "units": "gloo's ring, FSDP2's units"}
# Of the largest distance from one process, which adds in another order: coarse, as Adam makes the rounding of a gradient near 0 as
# large as a step of `lr`. The sharp question is that of bits.
BOUNDS = {"float32": 1e-3, "float64": 1e-11}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--world-size", type=whole("world_size"), default=4, metavar="N", help="ranks (4)")
    add("--steps", type=whole("steps"), default=10, metavar="N", help="updates (10)")
    add("--size", default="tiny", metavar="SIZE", help=f"the model, {' or '.join(SIZES)} (tiny)")
    add("--rounds", type=whole("rounds"), metavar="N", help="of timed turns; 0: no times (by size)")
    deadline = f"seconds that one stack's run may take ({DEADLINE_S:g})"
    add("--deadline", type=number("deadline"), default=DEADLINE_S, metavar="S", help=deadline)


def run(args: argparse.Namespace) -> int:
    """Train and print; 0, or 1 where a stack is further from one process than rounding explains, or has not the bits of its order."""
    _check(args)
    prepare()
    from minigpt_dist.bench import stacks
    from minigpt_dist.cli.report import console as new_console
    from minigpt_dist.cli.report import say
    from minigpt_dist.verify.peers import unavailable

    missing = {name: why for name, peer in stacks.PEER_OF.items() if (why := unavailable(f"peer:{peer}"))}
    chosen = tuple(name for name in stacks.TIMED if name not in missing)
    out, N = new_console(), args.world_size
    rounds = ROUNDS[args.size] if args.rounds is None else args.rounds
    with out.status("training"):
        rows = stacks.compare_stacks(args.size, N, args.steps, args.deadline, chosen)
        times = stacks.time_stacks(args.size, N, rounds, TURN[args.size], args.deadline, chosen) if rounds else {}
    config = stacks.configuration(args.size, N, args.steps, "float32")
    known = stacks.orders(config)
    say(out, f"P = {config.model.numel():,}, {N} ranks, {args.steps} steps, the same weights and batches for all\n")
    _print_numbers(rows, known)
    _print_costs(rows, times)
    for why in missing.values():
        say(out, why, "yellow")
    wrong = [line for row in rows for line in _unlike(row, stacks.order_of(row.stack), known)]
    for line in wrong:
        say(out, line, "bold red")
    if not wrong:
        say(
            out,
            "\neach stack trains what one process trains; its bits are those of the order in which it adds gradients",
        )
    return EXIT_VIOLATED if wrong else EXIT_OK


def _check(args: argparse.Namespace) -> None:
    one_of("size", args.size, SIZES)
    seconds("deadline", args.deadline)
    try:
        for name in ("world_size", "steps"):
            require_count(name, getattr(args, name))
        if args.rounds is not None:
            require_count("rounds", args.rounds, least=0)
    except ValueError as error:
        raise UsageError(str(error)) from None
    if launched_ranks() is not None:
        raise UsageError("agree is one of a launcher's ranks, but should be started alone: it starts ranks itself")


def _print_numbers(rows: list[Row], known: list[str]) -> None:
    """Losses, distances and bits."""
    from minigpt_dist.cli.report import console as new_console
    from minigpt_dist.cli.report import say, table

    out = new_console()
    say(out, "Mean loss; largest distance from one process, of a loss and of a parameter at the end", "bold")
    apart = [f"{what}, {dtype}" for dtype in BOUNDS for what in ("loss", "parameter")]
    made = table(
        out, "stack", "step 1", f"step {len(rows[0].losses)}", *apart, "float32: same bits as one process in", left=1
    )
    made.columns[-1].justify = "left"
    for row in rows:
        cells = [f"{row.losses[0]:.6f}", f"{row.losses[-1]:.6f}"]
        cells += [f"{found[dtype]:.1e}" for dtype in BOUNDS for found in (row.loss_apart, row.param_apart)]
        made.add_row(row.stack, *cells, _orders(row, known))
    out.print(made)


def _orders(row: Row, known: list[str]) -> str:
    from minigpt_dist.bench.stacks import order_of

    if order_of(row.stack) not in known:
        return "(several buckets: not replayed)"
    return "; ".join(WORDS[order] for order in row.same_bits) or "no order"


def _print_costs(rows: list[Row], times: dict[str, tuple[float, float]]) -> None:
    """Bytes and time. One process holds what no rank does, and has no part in the turns."""
    from minigpt_dist.cli.report import console as new_console
    from minigpt_dist.cli.report import say, table

    out = new_console()
    say(out, "\nBytes a rank after a step (DDP's buckets, in C++, are not seen); milliseconds a step, in turns", "bold")
    made = table(out, "stack", "parameters", "gradients", "optimizer", "sum", "ms", "of DDP's", left=1)
    for row in (row for row in rows if row.bytes):
        cells = [f"{count:,}" for count in (*row.bytes.values(), sum(row.bytes.values()))]
        taken, ratio = times.get(row.stack, (None, None))
        cells += ["" if taken is None else f"{1e3 * taken:.1f}", "" if ratio is None else f"{ratio:.2f}"]
        made.add_row(row.stack, *cells)
    out.print(made)


def _unlike(row: Row, order: str, known: list[str]) -> list[str]:
    """What a stack's row says that should not be."""
    found = []
    for dtype, bound in BOUNDS.items():
        for what, apart in (("losses", row.loss_apart[dtype]), ("parameters", row.param_apart[dtype])):
            if not apart <= bound:
                found.append(f"{row.stack}: {what} are {apart:.1e} apart in {dtype}, but should be at most {bound:g}")
    if order in known and order not in row.same_bits:
        found.append(f"{row.stack}: the bits are those of {_orders(row, known)}, but should be those of {WORDS[order]}")
    return found
