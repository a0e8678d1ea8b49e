"""The commands by name, each a module that is imported only when it is called.

Owns the list, and what a command must offer. A new command is a module with the four names of `Command`, and a line in
`MODULES`.
"""

from __future__ import annotations

import argparse
import importlib
from typing import Protocol, cast

import minigpt_dist
from minigpt_dist.cli.usage import Parser, UsageError

MODULES = {
    "train": "minigpt_dist.cli.train",
    "verify": "minigpt_dist.cli.verify",
    "faults": "minigpt_dist.cli.faults",
    "diff": "minigpt_dist.cli.diff",
    "incident": "minigpt_dist.cli.incident",
    "plan": "minigpt_dist.cli.plan",
    "bench": "minigpt_dist.cli.bench",
    "agree": "minigpt_dist.cli.agree",
    "ddp": "minigpt_dist.cli.ddp",
    "pipeline": "minigpt_dist.cli.pipeline",
    "memory": "minigpt_dist.cli.memory",
    "memory-table": "minigpt_dist.cli.memory_table",
    "report": "minigpt_dist.cli.run_report",
    "grade": "minigpt_dist.cli.grade",
    "rubric": "minigpt_dist.cli.rubric",
    "new": "minigpt_dist.cli.new",
    "gradescope": "minigpt_dist.cli.gradescope",
}
DEFAULT = "train"
PROGRAM = "minigpt-dist"


class Command(Protocol):
    """What a command's module offers. `run` returns the exit code; it may raise UsageError (2) and LaunchError (3)."""

    NAME: str
    HELP: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, args: argparse.Namespace) -> int: ...


def load(name: str) -> Command:
    """The command called `name`. UsageError if there is none."""
    if name not in MODULES:
        raise UsageError(f"command is {name!r}, but should be one of {', '.join(MODULES)}")
    return cast(Command, importlib.import_module(MODULES[name]))


def parser_of(command: Command) -> Parser:
    """The parser of one command's options."""
    parser = Parser(prog=f"{PROGRAM} {command.NAME}", description=command.HELP, allow_abbrev=False)
    command.add_arguments(parser)
    return parser


def overview() -> str:
    """What `minigpt-dist --help` prints."""
    lines = [f"{name:<10} {load(name).HELP}" for name in MODULES]
    return "\n".join(
        [
            f"usage: {PROGRAM} [command] [options]",
            "",
            f"{minigpt_dist.__name__} {minigpt_dist.__version__}. Without a command: {DEFAULT}.",
            "",
            *lines,
            "",
            f"{PROGRAM} COMMAND --help lists a command's options.",
            "exit codes: 0 all holds, 1 an invariant is broken, 2 wrong usage, 3 the ranks did not reach their end",
        ]
    )
