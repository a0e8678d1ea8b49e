"""`minigpt-dist pipeline`: a schedule really run, as a Gantt chart, with its bubble and activations foretold and measured.

Owns the options, the words and the table. Leaves the run to `bench/pipeline.py`, the charts to `parallel/pipeline/gantt.py`.
"""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from minigpt_dist.cli.train import launched_ranks
from minigpt_dist.cli.usage import EXIT_OK, EXIT_VIOLATED, UsageError, number, one_of, seconds, whole
from minigpt_dist.config import ModelConfig
from minigpt_dist.launch.client import prepare
from minigpt_dist.require import require_count

if TYPE_CHECKING:
    from rich.console import Console

    from minigpt_dist.bench.pipeline import PipelineRun

NAME = "pipeline"
HELP = "run a pipeline schedule; show who works when, its bubble and activations, foretold and measured"
NAMES, CUTS, DEADLINE_S, WIDTH = ("gpipe", "1f1b", "interleaved"), ("balanced", "even"), 120.0, 100
EMBED_DIM, SEQ_LEN, VOCAB, BATCH = 128, 64, 256, 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--stages", type=whole("stages"), default=4, metavar="P", help="ranks, each with a stage a chunk (4)")
    add("--micro-batches", type=whole("micro_batches"), default=8, metavar="M", help="a step (8)")
    add("--schedule", default="1f1b", metavar="NAME", help=f"{', '.join(NAMES)} (1f1b)")
    add("--chunks", type=whole("chunks"), metavar="V", help="stages a rank, of an interleaved schedule (2)")
    add("--layers", type=whole("layers"), metavar="L", help="blocks of the model (two a stage)")
    add("--embed-dim", type=whole("embed_dim"), default=EMBED_DIM, metavar="E", help=f"of the model ({EMBED_DIM})")
    add("--tie-head", action="store_true", help="share the embedding's weight with the head, on another rank")
    add("--cut", default="balanced", metavar="HOW", help="balanced by measured cost, or even (balanced)")
    add("--steps", type=whole("steps"), default=5, metavar="N", help="steps of which the quickest is shown (5)")
    add("--png", type=Path, metavar="FILE", help="also draw the chart (needs matplotlib)")
    add("--svg", type=Path, metavar="FILE", help="the same")
    deadline = f"seconds a run may take ({DEADLINE_S:g})"
    add("--deadline", type=number("deadline"), default=DEADLINE_S, metavar="S", help=deadline)


def run(args: argparse.Namespace) -> int:
    """Run, print, draw; 0, or 1 where a bit differs from one process, or bytes from the formula."""
    _check(args)
    prepare()
    from minigpt_dist.bench.pipeline import run_pipeline
    from minigpt_dist.cli.report import console, say
    from minigpt_dist.parallel.pipeline.schedule import SCHEDULES

    chunks = args.chunks or 2
    sizes = (args.stages, args.micro_batches, *([chunks] if args.schedule == "interleaved" else []))
    try:
        schedule = SCHEDULES[args.schedule](*sizes)
        model = _model(args, stages=args.stages * (chunks if args.schedule == "interleaved" else 1))
        found = run_pipeline(model, schedule, BATCH, args.steps, args.cut, args.deadline)
    except ValueError as error:
        raise UsageError(str(error)) from None
    out = console()
    title = f"{args.schedule}, {args.stages} ranks, {args.micro_batches} micro-batches"
    say(
        out,
        f"{title} of {BATCH} x {SEQ_LEN} tokens; P = {model.numel():,}, {model.num_layers + 2} layers, cut {args.cut}",
    )
    _print_chart(out, found)
    _print_table(out, found)
    _print_bubbles(out, found, chunks if args.schedule == "interleaved" else 1)
    for target in (args.png, args.svg):
        if target is not None:
            _draw(found, target, title)
            say(out, f"\n{target}: the chart")
    return _print_verdict(out, found)


def _check(args: argparse.Namespace) -> None:
    one_of("schedule", args.schedule, NAMES)
    one_of("cut", args.cut, CUTS)
    seconds("deadline", args.deadline)
    if args.chunks is not None and args.schedule != "interleaved":
        raise UsageError(f"chunks is {args.chunks}, but should be given with an interleaved schedule only")
    try:
        for name in ("stages", "micro_batches", "chunks", "layers", "embed_dim", "steps"):
            if getattr(args, name) is not None:
                require_count(name, getattr(args, name))
    except ValueError as error:
        raise UsageError(str(error)) from None
    for name in ("png", "svg"):
        target = getattr(args, name)
        if target is not None and (target.is_dir() or not target.parent.is_dir() or target.suffix != f".{name}"):
            raise UsageError(f"{name} is {str(target)!r}, but should be a .{name} file in a folder that is there")
        if target is not None and importlib.util.find_spec("matplotlib") is None:
            raise UsageError("a picture needs matplotlib, which is not installed: pip install 'minigpt-dist[report]'")
    if launched_ranks() is not None:
        raise UsageError("pipeline is one of a launcher's ranks, but should be started alone: it starts ranks itself")


def _model(args: argparse.Namespace, stages: int) -> ModelConfig:
    blocks = args.layers or 2 * stages
    sizes = {"vocab": VOCAB, "embed_dim": args.embed_dim, "num_layers": blocks, "seq_len": SEQ_LEN}
    return ModelConfig(**sizes, tie_head=args.tie_head)


def _print_chart(console: Console, found: PipelineRun) -> None:
    from minigpt_dist.cli.report import say
    from minigpt_dist.parallel.pipeline.gantt import as_text

    say(console, "\nAs run (digit: forward of that micro-batch, letter: its backward, a = 0, dot: idle)", "bold")
    say(console, as_text(found.spans, WIDTH))


def _print_table(console: Console, found: PipelineRun) -> None:
    """A row a rank: its layers, its seconds, what it held."""
    from minigpt_dist.cli.report import say, table
    from minigpt_dist.parallel.pipeline.timeline import busy, peak_live

    everything = [span for row in found.spans for span in row]
    length = max(span.end for span in everything) - min(span.start for span in everything)
    say(console, f"\nThe step took {1e3 * length:.1f} ms", "bold")
    columns = ("layers", "busy ms", "idle ms", "on a core ms", "live", "bound", "activations, bytes", "by formula")
    made = table(console, "rank", *columns, left=2)
    for rank, row in enumerate(found.spans):
        stages = range(rank, len(found.cuts) - 1, len(found.spans))
        layers = ", ".join(f"{found.cuts[s]}-{found.cuts[s + 1] - 1}" for s in stages)
        core = sum(found.cpu_seconds[span.action] for span in row)
        times = [f"{1e3 * each:.1f}" for each in (busy(row), length - busy(row), core)]
        bound = str(peak_live(found.schedule[rank]))
        held = (f"{found.live_bytes[rank]:,}", f"{found.foretold_bytes[rank]:,}")
        made.add_row(str(rank), layers, *times, str(found.live[rank]), bound, *held)
    console.print(made)


def _print_bubbles(console: Console, found: PipelineRun, chunks: int) -> None:
    """The share of all ranks' time in which nothing runs: by formula, simulated twice, measured."""
    from minigpt_dist.bench.machine import machine
    from minigpt_dist.cli.report import say, table
    from minigpt_dist.parallel.pipeline.schedule import micros_of
    from minigpt_dist.parallel.pipeline.timeline import bubble_fraction, ideal_bubble, simulate

    ranks, cores = len(found.spans), machine()["cores"]
    replayed = simulate(found.schedule, found.cpu_seconds.__getitem__)
    say(console, "\nBubble, the share of the ranks' time in which nothing runs", "bold")
    made = table(console, "", "", left=1)
    made.show_header = False
    for name, value in (
        ("formula (P-1)/(MV+P-1), equal stages", ideal_bubble(ranks, micros_of(found.schedule), chunks)),
        ("simulated, a backward twice a forward", bubble_fraction(simulate(found.schedule))),
        ("simulated, each action as long as it kept a core busy, messages free", bubble_fraction(replayed)),
        ("measured, from the trace of what ran", bubble_fraction(found.spans)),
    ):
        made.add_row(name, f"{value:.1%}")
    console.print(made)
    if ranks > cores:
        say(console, f"{ranks} ranks shared {cores} cores: the last figure holds their waits for a core too.")


def _draw(found: PipelineRun, target: Path, title: str) -> None:
    from minigpt_dist.parallel.pipeline.gantt import Panel, draw
    from minigpt_dist.parallel.pipeline.timeline import simulate

    panels = [
        Panel("simulated, equal stages", simulate(found.schedule), "time of a forward"),
        Panel("as run", found.spans, "ms", 1e3),
    ]
    try:
        draw(panels, target, title)
    except OSError as error:
        raise UsageError(f"{target} cannot be written: {error.strerror}") from None


def _print_verdict(console: Console, found: PipelineRun) -> int:
    from minigpt_dist.cli.report import say
    from minigpt_dist.parallel.pipeline.timeline import peak_live

    wrong = [f"{name}: other bits than one process's" for name in found.wrong]
    for rank, (row, live) in enumerate(zip(found.schedule, found.live, strict=True)):
        if live != peak_live(row):
            wrong.append(f"rank {rank} held {live} activations, but should hold {peak_live(row)}")
        if found.live_bytes[rank] != found.foretold_bytes[rank]:
            wrong.append(
                f"rank {rank} kept {found.live_bytes[rank]:,} bytes, but should keep {found.foretold_bytes[rank]:,}"
            )
    for line in wrong:
        say(console, line, "bold red")
    if not wrong:
        bits = "losses and gradients have the bits of one process that runs the same micro-batches one after the other"
        say(console, f"\n{bits}", "bold green")
    return EXIT_VIOLATED if wrong else EXIT_OK
