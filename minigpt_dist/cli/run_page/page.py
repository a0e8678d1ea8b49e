"""The page of a run: its curves and a table, in one file that needs nothing else."""

from __future__ import annotations

from pathlib import Path

import jinja2
import markupsafe

from minigpt_dist.cli.run_page.curves import as_svg, charts
from minigpt_dist.trace import Trace

_ENVIRONMENT = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=jinja2.StrictUndefined
)


def render(trace: Trace, name: str) -> str:
    """The page of the run called `name`."""
    losses, norms = trace.mean_losses(), trace.grad_norms()
    return _ENVIRONMENT.get_template("run.html.j2").render(
        name=name,
        ranks=trace.world_size,
        header={key: value for key, value in trace.header.items() if not isinstance(value, dict)},
        charts=[
            (chart.title, markupsafe.Markup(as_svg(chart))) for chart in charts(trace)
        ],  # matplotlib's own text: numbers
        rows=[(step, f"{loss:.6f}", f"{norms[step]:.6g}") for step, loss in losses.items()],
    )
