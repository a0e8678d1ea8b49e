"""The refactor check: two implementations side by side on this machine, compared bit for bit.

Owns the cases and the verdict. No golden values are kept: bits depend on the machine, so both sides run on it, now. Leaves
revisions to `revisions.py`, running to `refactor_run.py`, and finding the first difference to `locate.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from minigpt_dist.config import ModelConfig, TrainConfig
from minigpt_dist.launch.errors import LaunchError
from minigpt_dist.verify.difference import Difference
from minigpt_dist.verify.locate import locate
from minigpt_dist.verify.locate_trace import locate_in_traces
from minigpt_dist.verify.refactor_run import COMMAND, Ran, is_command

# 1,485 parameters, which no world size divides.
UNEVEN = ModelConfig(vocab=19, embed_dim=9, num_heads=3, num_layers=1, seq_len=8)
# Losses of correct runs that add in different orders, 20 steps, float32: at most 2.0e-7 apart, relative.
LOSS_REL = 5e-6


@dataclass(frozen=True)
class Outcome:
    """One case on both sides: identical; or the first difference, and which sides the oracle finds wrong, with what; or
    why it was not compared."""

    case: str
    difference: Difference | None = None
    wrong: tuple[tuple[str, Difference], ...] = ()
    skipped: str = ""

    @property
    def identical(self) -> bool:
        return self.difference is None and not self.skipped


def cases(world_sizes: Sequence[int], seed: int = 0) -> dict[str, TrainConfig]:
    """Name -> configuration: what two sides are compared over."""
    found = {}
    for N in world_sizes:
        plain = TrainConfig(world_size=N, steps=4, checkpoint_step=2, batch=2, seed=seed)
        found[f"N={N} float32"] = plain
        found[f"N={N} float64, uneven shards, 2 micro-batches, weight decay"] = replace(
            plain, dtype="float64", micro_batches=2, weight_decay=0.1, model=UNEVEN
        )
        found[f"N={N} exact reduction, 2 micro-batches"] = replace(
            plain, reduction="exact", micro_batches=2, model=UNEVEN
        )
        found[f"N={N} dropout"] = replace(plain, model=replace(UNEVEN, dropout=0.1))
    largest = max(world_sizes)
    found[f"N={largest} {COMMAND}"] = TrainConfig(world_size=largest, steps=4, checkpoint_step=2, batch=2, seed=seed)
    return found


def outcome(name: str, config: TrainConfig, base: Ran, head: Ran) -> Outcome:
    """One case: `head` is the observed run, `base` the expected one.

    Raises NoImplementationError for a side without the contract's names, LaunchError where neither side comes to an end.
    """
    reports = [(one.side.label, one.report(name)) for one in (base, head)]
    for label, report in reports:
        if "skipped" in report:
            return Outcome(name, skipped=f"{label}: {report['skipped']}")
    broken = [(label, report["error"]) for label, report in reports if "error" in report]
    if len(broken) == 2:
        words = "; ".join(f"{label}: {error['kind']}: {error['message']}" for label, error in broken)
        raise LaunchError(f"{name}: neither side comes to an end: {words}")
    if broken:
        ((label, error),) = broken
        cause = f"only {label} raises {error['kind']}: {error['message']}\n{error['traceback']}".rstrip()
        failed = Difference(0, error["rank"], "launch", "the run", 0, cause=cause)
        return Outcome(name, failed, ((label, failed),))
    return _compared(name, config, base, head)


def _compared(name: str, config: TrainConfig, base: Ran, head: Ran) -> Outcome:
    if is_command(name):
        return _compared_traces(name, base, head)
    runs = [one.run(name, config) for one in (base, head)]
    found, wrong = locate(runs[1], runs[0]), []
    for one, run in zip((base, head), runs, strict=True):
        oracle = one.oracle(name) if found is not None else None
        beyond = None if oracle is None else locate(run, oracle)
        wrong += [] if beyond is None else [(one.side.label, beyond)]
    return Outcome(name, found, tuple(wrong))


def _compared_traces(name: str, base: Ran, head: Ran) -> Outcome:
    """The package's own loop, by the traces it wrote. They hold digests, so how far apart two runs are, only losses tell."""
    try:
        before, after = base.trace(name), head.trace(name)
    except ValueError as error:
        return Outcome(name, skipped=f"another format of traces: {error}")
    found, right = locate_in_traces(after, before), before.mean_losses()
    for step, loss in after.mean_losses().items():
        if not abs(loss - right.get(step, math.nan)) <= LOSS_REL * abs(loss):
            apart = Difference(step, 0, "forward", "mean loss", 0, repr(loss), repr(right.get(step)))
            return Outcome(name, found, ((f"{head.side.label} or {base.side.label}", apart),))
    return Outcome(name, found)


def first_bad(commits: Sequence[str], is_bad: Callable[[str], bool]) -> str:
    """The first bad one of `commits`, oldest first, by halving; the last is known to be bad, and bad ones stay bad."""
    low, high = 0, len(commits) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if is_bad(commits[middle]) else (middle + 1, high)
    return commits[high]
