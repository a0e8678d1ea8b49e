"""The profile of a run, from its trace: tokens a second, percentiles of step time, share of communication, memory by kind, price.

Owns the arithmetic, and a training run to take it from. A step takes as long as its slowest rank.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence

from minigpt_dist.bench.goals import MEMORY, WARM_UP
from minigpt_dist.bench.step import LR, SIZES
from minigpt_dist.config import TrainConfig
from minigpt_dist.launch import run_world
from minigpt_dist.trace import Record, Trace, merge
from minigpt_dist.worker import rank_body


def percentile(values: Sequence[float], percent: float) -> float:
    """The least of `values` that at least `percent` of a hundred are not above (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(math.ceil(percent / 100 * len(ordered)), 1) - 1]


def profile_of(trace: Trace, price_per_hour: float | None = None) -> dict[str, float]:
    """Figures by name (`goals.FIGURES`). ValueError for a trace of no more steps than are left out.

    price_per_hour: of all devices together, in any currency; without it there is no price of tokens.
    """
    steps = [step for step in trace.steps if step][WARM_UP:]
    if not steps:
        raise ValueError(f"steps are {len(trace.steps)}, but should be above {WARM_UP}, which warm up")
    records = [trace.at(step) for step in steps]
    times = [max(sum(r.seconds.values()) for r in at) for at in records]
    tokens = sum(len(r.tokens) for at in records for r in at)
    talked = sum(r.seconds.get("communication", 0.0) for at in records for r in at)
    held = trace.counted()
    kinds = {f"{kind}_bytes": float(max(r.bytes.get(kind, 0) for r in held)) for kind in MEMORY} if held else {}
    found = {
        "tokens_per_second": tokens / sum(times),
        **{f"step_ms_p{percent}": 1e3 * percentile(times, percent) for percent in (50, 90, 99)},
        "communication_share": talked / sum(sum(r.seconds.values()) for at in records for r in at),
        **kinds,
        **({"total_bytes": float(max(sum(r.bytes.values()) for r in held))} if held else {}),
        "loss": trace.mean_losses()[steps[-1]],
        "drift_steps": float(len({r.step for r in trace.records if r.drift})),
    }
    if price_per_hour is not None:
        found["price_per_million_tokens"] = price_per_hour / 3600 / found["tokens_per_second"] * 1e6
    return found


def train_profiled(size: str, world_size: int, steps: int, deadline_s: float) -> Trace:
    """The trace of a run of our own pieces on the made corpus, memory and times recorded."""
    config = TrainConfig(world_size=world_size, steps=steps, lr=LR, checkpoint_step=0, model=SIZES[size])
    with tempfile.TemporaryDirectory(prefix="minigpt-dist-") as folder:
        ranks = run_world(
            rank_body, world_size, config.to_dict(), folder, False, ["bytes"], "cpu", deadline_s=deadline_s
        )
    return merge({}, [[Record(**record) for record in rank["records"]] for rank in ranks])
