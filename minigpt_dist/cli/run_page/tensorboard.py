"""A run's curves as TensorBoard events, where `tensorboard` is installed."""

from __future__ import annotations

import math
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from minigpt_dist.cli.run_page.curves import charts
from minigpt_dist.trace import Trace


def write_events(trace: Trace, folder: Path) -> None:
    """One scalar a line of every chart, by step, into `folder`."""
    with SummaryWriter(str(folder)) as writer:
        for chart in charts(trace):
            for name, line in chart.lines.items():
                for step, value in line.items():
                    if math.isfinite(value):
                        writer.add_scalar(f"{chart.title}/{name}", value, step)
