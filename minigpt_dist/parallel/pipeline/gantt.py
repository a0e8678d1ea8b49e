"""Gantt charts of a pipeline step: as text, and as a picture where matplotlib is installed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minigpt_dist.parallel.pipeline.timeline import Span, bubble_fraction, busy

FORWARD, BACKWARD = ("#9ecae1", "#4a98c9", "#1764ab"), ("#fdd0a2", "#fd8d3c", "#d94801")  # by chunk, lightest first
READABLE = 0.007  # of the width: a narrower bar has no room for its number


@dataclass(frozen=True)
class Panel:
    """One chart of a picture. spans: [rank][position]. scale: from their unit to `unit`, in which the axis is labelled."""

    title: str
    spans: Sequence[Sequence[Span]]
    unit: str
    scale: float = 1.0


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
            start = min(start, width - 1)
            mark = str(span.action.micro % 10) if span.action.kind == "F" else chr(ord("a") + span.action.micro % 26)
            line[start : max(end, start + 1)] = mark * max(end - start, 1)
        lines.append(f"rank {rank} |{''.join(line[:width])}|")
    return "\n".join(lines)


def draw(panels: Sequence[Panel], path: Path | str, title: str) -> None:
    """Write the charts, one below the other, to `path`: PNG, SVG or whatever its ending says.

    ImportError without matplotlib (extra "report").
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    ranks = len(panels[0].spans)
    figure: Any = Figure(figsize=(11, len(panels) * (0.5 * ranks + 1.1) + 0.6), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    for axes, panel in zip(figure.subplots(len(panels), squeeze=False)[:, 0], panels, strict=True):
        _draw_panel(axes, panel)
    chunks = 1 + max(span.action.stage for row in panels[0].spans for span in row) // ranks
    named = [
        (kind, colours[c % 3], c)
        for kind, colours in (("forward", FORWARD), ("backward", BACKWARD))
        for c in range(chunks)
    ]
    patches = [Patch(color=colour, label=kind if chunks == 1 else f"{kind}, chunk {c}") for kind, colour, c in named]
    figure.legend(handles=patches, loc="outside lower center", ncols=min(len(patches), 6), fontsize=8, frameon=False)
    figure.suptitle(f"{title}; numbers are micro-batches", fontsize=11)
    figure.savefig(path)


def _draw_panel(axes: Any, panel: Panel) -> None:
    first = min(span.start for row in panel.spans for span in row)
    whole = max(span.end for row in panel.spans for span in row) - first
    for rank, row in enumerate(panel.spans):
        for span in row:
            colours = FORWARD if span.action.kind == "F" else BACKWARD
            left, length = (span.start - first) * panel.scale, (span.end - span.start) * panel.scale
            colour = colours[span.action.stage // len(panel.spans) % 3]
            axes.barh(rank, length, left=left, height=0.82, color=colour, edgecolor="white", linewidth=0.5)
            if span.end - span.start > READABLE * whole:
                axes.text(left + length / 2, rank, str(span.action.micro), ha="center", va="center", fontsize=7)
        idle = f" idle {1 - busy(row) / whole:.0%}"
        axes.text(whole * panel.scale, rank, idle, va="center", fontsize=8, color="#555555")
    axes.set_yticks(range(len(panel.spans)), [f"rank {rank}" for rank in range(len(panel.spans))], fontsize=8)
    axes.set_xlim(0, whole * panel.scale * 1.075)
    axes.invert_yaxis()
    axes.tick_params(axis="x", labelsize=8)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_facecolor("#f4f4f4")
    axes.set_xlabel(panel.unit, fontsize=8)
    axes.set_title(f"{panel.title}: bubble {bubble_fraction(panel.spans):.1%}", fontsize=9, loc="left")
