"""`minigpt-dist gradescope`: the archive to upload as an assignment's autograder.

Owns the options and the file. Leaves the archive's bytes to `grading/gradescope_zip`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from minigpt_dist.cli.usage import EXIT_OK, UsageError

NAME = "gradescope"
HELP = "write autograder.zip, to be uploaded to Gradescope"
ARCHIVE = "autograder.zip"
ISOLATIONS = ("auto", "bwrap", "namespaces", "uid", "none")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("folder", metavar="DIR", type=Path, help=f"where {ARCHIVE} goes")
    add("--rubric", type=Path, metavar="FILE", help="a rubric of your own (the suite's)")
    add(
        "--isolation",
        choices=ISOLATIONS,
        default="auto",
        help="how submissions are run there (auto: the strongest that works)",
    )
    add("--torch-index", default="", metavar="URL", help="the package index of torch's CPU builds (pip's own index)")


def run(args: argparse.Namespace) -> int:
    """Write the archive. UsageError for a rubric that cannot be used and a folder that cannot be written."""
    from minigpt_dist.grading.gradescope_zip import NotInstalledError, autograder

    chosen = None if args.rubric is None else _checked(args.rubric)
    try:
        archive = autograder(chosen, args.torch_index, args.isolation)
        args.folder.mkdir(parents=True, exist_ok=True)
        (args.folder / ARCHIVE).write_bytes(archive)
    except NotInstalledError as error:
        raise UsageError(str(error)) from None
    except OSError as error:
        wanted = "a folder that can be written"
        raise UsageError(f"DIR is {str(args.folder)!r}, but should be {wanted}: {error.strerror}") from None
    print(
        f"wrote {args.folder / ARCHIVE} ({len(archive):,} bytes): upload it as the autograder of a programming assignment"
    )
    return EXIT_OK


def _checked(path: Path) -> bytes:
    """The rubric's bytes, once it has been read as one. UsageError for one that is none."""
    from minigpt_dist.grading import rubric
    from minigpt_dist.grading.values import RubricError

    try:
        rubric.load(path)
        return path.read_bytes()
    except (RubricError, OSError) as error:
        raise UsageError(f"rubric is {str(path)!r}, but should be a rubric that can be used: {error}") from None
