"""`minigpt-dist report RUN`: a run's metrics as one page with curves, and as TensorBoard events where asked.

Owns the options. Leaves reading to `run_page/metrics.py`, the picture to `run_page/curves.py`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from minigpt_dist.cli.settings import checked_out, make_out
from minigpt_dist.cli.usage import EXIT_OK, UsageError

NAME = "report"
HELP = "turn a run's folder into one self-contained page with curves"
NEEDS = "report needs {0}, which is not installed: pip install 'minigpt-dist[{1}]'"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("folder", type=Path, metavar="RUN", help="what `train --out RUN` left, or is still writing")
    add("--html", type=Path, metavar="FILE", help="the page (RUN/report.html)")
    add(
        "--tensorboard",
        type=Path,
        metavar="DIR",
        help="also write the curves as TensorBoard events into this new folder",
    )


def run(args: argparse.Namespace) -> int:
    """Write and say where; UsageError for a folder without metrics, one that is in use, or a package that is missing."""
    from minigpt_dist.cli.run_page.metrics import read_run

    if args.tensorboard is not None:  # a second set of events beside the first would be read as one curve
        checked_out(args.tensorboard, "tensorboard")
    try:
        trace = read_run(args.folder)
    except (OSError, ValueError) as error:
        raise UsageError(str(error)) from None
    try:
        from minigpt_dist.cli.run_page.page import render
    except ImportError as error:
        raise UsageError(NEEDS.format(error.name, "report")) from None
    target = args.html or args.folder / "report.html"
    try:
        target.write_text(render(trace, args.folder.name), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"html is {str(target)!r}, which cannot be written: {error.strerror}") from None
    print(f"{target}: {len(trace.mean_losses())} steps of {trace.world_size} ranks")
    if args.tensorboard is not None:
        try:
            from minigpt_dist.cli.run_page.tensorboard import write_events
        except ImportError:
            raise UsageError(NEEDS.format("tensorboard", "tensorboard")) from None
        write_events(trace, make_out(args.tensorboard, "tensorboard"))
        print(f"{args.tensorboard}: TensorBoard events")
    return EXIT_OK
