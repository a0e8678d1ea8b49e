"""Gantt charts of a pipeline step: as text, and as a picture where matplotlib is installed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from minigpt_dist.parallel.pipeline.timeline import Span


def as_text(spans: Sequence[Sequence[Span]], width: int = 72) -> str:
    """A line a rank: the micro-batch's last digit where a forward runs, a letter (a = 0) where a backward does, a dot where nothing does.

    spans: [rank][position], from `simulate` or measured. width: characters for the whole time.
    """
    everything = [span for rank in spans for span in rank]
    first = min(s.start for s in everything)
    scale = width / (max(s.end for s in everything) - first)
    lines = []
    for rank, row in enumerate(spans):
        line = ["."] * width
        for span in row:
            start, end = round((span.start - first) * scale), round((span.end - first) * scale)
            mark = str(span.action.micro % 10) if span.action.kind == "F" else chr(ord("a") + span.action.micro % 26)
            line[start : max(end, start + 1)] = mark * max(end - start, 1)
        lines.append(f"rank {rank} |{''.join(line[:width])}|")
    return "\n".join(lines)


def draw(spans: Sequence[Sequence[Span]], path: Path | str, title: str) -> None:
    """Write the chart to `path`: PNG, SVG or whatever its ending says. ImportError without matplotlib (extra "report")."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 0.6 * len(spans) + 1.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    first = min(span.start for row in spans for span in row)
    for rank, row in enumerate(spans):
        for span in row:
            forward = span.action.kind == "F"
            left, length = span.start - first, span.end - span.start
            axes.barh(
                rank,
                length,
                left=left,
                height=0.8,
                color="#8ecae6" if forward else "#ffb703",
                edgecolor="black",
                linewidth=0.4,
            )
            axes.text(left + length / 2, rank, str(span.action.micro), ha="center", va="center", fontsize=7)
    axes.set_yticks(range(len(spans)), [f"rank {rank}" for rank in range(len(spans))])
    axes.invert_yaxis()
    axes.set_xlabel("time")
    axes.set_title(f"{title} (blue: forward, orange: backward, number: micro-batch)", fontsize=9)
    figure.savefig(path)
