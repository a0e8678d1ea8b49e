"""A run's curves: numbers by step, ready to be drawn, and drawn as SVG.

Owns what each curve is. A curve's unit is in its title.
"""

from __future__ import annotations

import io
import math
from dataclasses import dataclass
from typing import Any

from minigpt_dist.trace import Trace


@dataclass(frozen=True)
class Chart:
    """One picture: `lines` maps a legend to its value by step."""

    title: str
    lines: dict[str, dict[int, float]]


def charts(trace: Trace) -> list[Chart]:
    """Loss, gradient norm, seconds by phase, tokens a second, bytes by kind: those of which the trace has numbers."""
    steps = [s for s in trace.steps if s]
    phases = sorted({phase for r in trace.records for phase in r.seconds})
    kinds = sorted({kind for r in trace.counted() for kind in r.bytes})
    seconds = {p: {s: max(r.seconds.get(p, 0.0) for r in trace.at(s)) * 1e3 for s in steps} for p in phases}
    whole = {s: sum(seconds[p][s] for p in phases) / 1e3 for s in steps}
    tokens = {s: sum(len(r.tokens) for r in trace.at(s)) for s in steps}
    counted = sorted({r.step for r in trace.counted()})
    found = [
        Chart("Loss, nats a token", {"mean over ranks": trace.mean_losses()}),
        Chart("Gradient norm, over all ranks", {"2-norm of the mean": trace.grad_norms()}),
        Chart("Step time by phase, ms, slowest rank", seconds),
        Chart("Tokens a second, all ranks", {"tokens": {s: tokens[s] / whole[s] for s in steps if whole[s] > 0}}),
        Chart(
            "Memory a rank, KiB: largest and mean over ranks",
            {
                f"{kind}, {name}": {
                    s: pick([r.bytes.get(kind, 0) / 1024 for r in trace.at(s) if r.bytes]) for s in counted
                }
                for kind in kinds
                for name, pick in (("max", max), ("mean", lambda values: sum(values) / len(values)))
            },
        ),
    ]
    return [c for c in found if any(math.isfinite(v) for line in c.lines.values() for v in line.values())]


def as_svg(chart: Chart) -> str:
    """The chart as an SVG element, the same bytes for the same numbers."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.hashsalt": chart.title, "svg.fonttype": "none"}):
        figure: Any = Figure(figsize=(7, 2.6), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.subplots()
        for name, line in chart.lines.items():
            axes.plot(list(line), list(line.values()), label=name, marker="." if len(line) < 60 else "")
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()[text.getvalue().index("<svg") :]
