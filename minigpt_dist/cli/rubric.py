"""`minigpt-dist rubric`: write the default rubric, to be copied and edited.

Owns the option. Leaves reading rubrics to `grading/rubric.py`.
"""

from __future__ import annotations

import argparse
from importlib import resources
from pathlib import Path

from minigpt_dist.cli.usage import EXIT_OK, UsageError

NAME = "rubric"
HELP = "write the default rubric, to copy and edit"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--out", type=Path, metavar="FILE", help="a file that is not there yet (stdout)")


def run(args: argparse.Namespace) -> int:
    """Write it; UsageError where the file is there, or cannot be."""
    text = resources.files("minigpt_dist.grading").joinpath("rubric.toml").read_text(encoding="utf-8")
    if args.out is None:
        print(text, end="")
        return EXIT_OK
    try:
        with args.out.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise UsageError(f"out is {str(args.out)!r}, which cannot be written: {error.strerror}") from None
    return EXIT_OK
