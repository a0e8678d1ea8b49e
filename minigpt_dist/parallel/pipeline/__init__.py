"""Pipeline parallelism: the layers of a model cut over ranks, micro-batches under way at once.

`schedule` says who does what in which order, as plain data; `timeline` says how long that takes and what it holds; `cut` divides a
model; `executor` runs it.
"""

from minigpt_dist.parallel.pipeline.cut import balanced_cuts, even_cuts, layers_of
from minigpt_dist.parallel.pipeline.executor import Pipeline
from minigpt_dist.parallel.pipeline.schedule import SCHEDULES, Action, Schedule, gpipe, interleaved, one_f_one_b
from minigpt_dist.parallel.pipeline.timeline import bubble_fraction, ideal_bubble, peak_live, simulate

__all__ = [
    "SCHEDULES",
    "Action",
    "Pipeline",
    "Schedule",
    "balanced_cuts",
    "bubble_fraction",
    "even_cuts",
    "gpipe",
    "ideal_bubble",
    "interleaved",
    "layers_of",
    "one_f_one_b",
    "peak_live",
    "simulate",
]
