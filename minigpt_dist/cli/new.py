"""`minigpt-dist new`: a folder to start from, with every piece as a stub that says what will be asked of it.

Owns the folder. Leaves the starter's words to `grading/starter`.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from minigpt_dist.cli.usage import EXIT_OK, UsageError

NAME = "new"
HELP = "write a starter folder: stubs that state shapes, rules and the invariant that will judge them"
STARTER = Path(__file__).parents[1] / "grading" / "starter"
FILES = ("README.md", "adapters.py", "solution.py")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", type=Path, help="a folder that is empty or not there yet")


def run(args: argparse.Namespace) -> int:
    """Write the starter. UsageError for a folder that holds anything, and for a place where none can be made."""
    folder: Path = args.folder
    try:
        write_starter(folder)
    except OSError as error:
        raise UsageError(
            f"DIR is {str(folder)!r}, but should be a folder that can be written: {error.strerror}"
        ) from None
    print(f"wrote {', '.join(FILES)} to {folder}; next: minigpt-dist grade {folder}")
    return EXIT_OK


def write_starter(folder: Path) -> None:
    """Copy the starter's files into `folder`, which is made if need be. UsageError if it holds anything, OSError if it cannot be."""
    if folder.is_dir() and any(folder.iterdir()):
        raise UsageError(f"DIR is {str(folder)!r}, which is not empty, but should be a new or an empty folder")
    folder.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        shutil.copyfile(STARTER / name, folder / name)
