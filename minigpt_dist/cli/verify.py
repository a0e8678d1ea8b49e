"""`minigpt-dist verify`: put the checks to an implementation, outside pytest.

Owns the options and their one-line errors. Imports no torch: the rank server loads it while this process does. Leaves
running the checks to `judging`.
"""

from __future__ import annotations

import argparse
import os

from minigpt_dist.cli.train import launched_ranks
from minigpt_dist.cli.usage import UsageError, names, number, seconds, sizes
from minigpt_dist.launch.client import prepare

NAME = "verify"
HELP = "put the invariants to an implementation and print a table"
OURS = "minigpt_dist"
DEADLINE_S = 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    deadline = f"seconds a run may take ({DEADLINE_S:g})"
    add("--impl", action="append", metavar="SPEC", help=f"a module, a path or fault:NAME; repeatable ({OURS})")
    add("--slots", type=names, default=(), metavar="A,B", help=f"only these pieces of it, the rest from {OURS}")
    add("--world-sizes", type=sizes("world_sizes"), default=(), metavar="N,M", help="ranks (each check's own list)")
    add("--only", type=names, default=(), metavar="CHECK,...", help="these checks; A stands for all that begin A.")
    add("--list", action="store_true", help="list the checks and what each claims")
    add("--deadline", type=number("deadline"), default=DEADLINE_S, metavar="S", help=deadline)


def run(args: argparse.Namespace) -> int:
    """Judge and print; 0 if no check failed, 1 if one did."""
    launched, specs = launched_ranks(), [_checked(spec) for spec in args.impl or [OURS]]
    seconds("deadline", args.deadline)
    if launched is not None and args.world_sizes not in ((), (launched,)):
        asked = ",".join(map(str, args.world_sizes))
        raise UsageError(f"world_sizes is {asked}, but should be {launched}, the ranks that the launcher started")
    if launched is None and not args.list:
        prepare()
    from minigpt_dist.cli import judging

    checks = judging.chosen(args.only, composed_only=launched is not None)
    judging.check_slots(args.slots)
    if args.list:
        return judging.print_list(checks)
    if launched is not None:
        return judging.judge_launched(specs, args.slots, checks, launched, args.deadline)
    return judging.judge_here(specs, args.slots, checks, args.world_sizes, args.deadline)


def _checked(spec: str) -> str:
    """`spec`; UsageError for a path at which nothing is. What else a spec may name, only a rank finds out."""
    path = spec.endswith(".py") or os.sep in spec
    if path and not os.path.exists(spec):
        raise UsageError(f"impl is {spec!r}, but should be the path of a file or folder that is there")
    return spec
