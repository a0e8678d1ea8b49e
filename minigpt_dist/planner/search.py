"""The search: every layout that a cluster could run, judged; what fits, fastest first, and why the others do not.

Owns the enumeration and the order. A layout is refused where whatever is to carry it out would refuse it: by a ValueError of the project's
one shape, whose subject is the reason.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from minigpt_dist.layout import CHUNKS, ZERO_STAGES, Layout
from minigpt_dist.planner.cluster import Cluster
from minigpt_dist.planner.communication import Communication, communication
from minigpt_dist.planner.duration import Duration, bubble_fraction, duration
from minigpt_dist.planner.memory import Memory, memory
from minigpt_dist.planner.shape import ModelShape
from minigpt_dist.planner.techniques import OWN, Techniques
from minigpt_dist.require import require

MICRO_BATCHES = (1, 2, 4, 8, 16, 32)  # sequences in one


@dataclass(frozen=True)
class Choices:
    """What may be chosen from; None: whatever is possible. batch: sequences a micro-batch."""

    dp: tuple[int, ...] | None = None
    tp: tuple[int, ...] | None = None
    pp: tuple[int, ...] | None = None
    zero_stage: tuple[int, ...] = ZERO_STAGES
    precision: tuple[str, ...] = ("bfloat16",)
    recompute: tuple[bool, ...] = (False, True)
    batch: tuple[int, ...] = MICRO_BATCHES
    schedule: tuple[str, ...] = ("1f1b", "interleaved")


@dataclass(frozen=True)
class Plan:
    """A layout that fits, `batch` sequences a micro-batch, and what is predicted of it. tokens_per_second: of the whole job."""

    layout: Layout
    batch: int
    memory: Memory
    communication: Communication
    duration: Duration
    bubble: float
    tokens_per_second: float
    flops_per_device: float

    def to_dict(self) -> dict[str, Any]:
        """Plain data: bytes, seconds, and the layout's own fields."""
        return {
            "layout": dict(vars(self.layout)),
            "batch": self.batch,
            "memory_bytes": self.memory.to_dict(),
            "communication_bytes": self.communication.to_dict(),
            "bubble": self.bubble,
            "seconds": self.duration.to_dict(),
            "tokens_per_second": self.tokens_per_second,
            "flops_per_device": self.flops_per_device,
        }


@dataclass
class Failure:
    """Why some layouts were refused: how many, and the first of them with its message."""

    reason: str
    example: str
    count: int = 0


@dataclass
class Search:
    """feasible: fastest first; of equals, those that hold and send less. failures: by how many layouts they took."""

    feasible: list[Plan] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)

    def rank(self, **axes: Any) -> tuple[int, int]:
        """(place of the best plan with these fields of its layout, number of places), a place for each (dp, tp, pp) that fits.

        ValueError if none fits.
        """
        seen: dict[tuple[int, int, int], int] = {}
        for plan in self.feasible:
            place = seen.setdefault((plan.layout.dp, plan.layout.tp, plan.layout.pp), len(seen) + 1)
            if all(getattr(plan.layout, name) == value for name, value in axes.items()):
                found = place
                break
        else:
            raise ValueError(f"layout is {axes}, but should be one that fits")
        return found, len({(p.layout.dp, p.layout.tp, p.layout.pp) for p in self.feasible})


def search(
    shape: ModelShape,
    cluster: Cluster,
    global_batch: int,
    choices: Choices = Choices(),
    techniques: Techniques = OWN,
) -> Search:
    """Judge every layout; `global_batch` sequences a step."""
    found, failures = Search(), dict[str, Failure]()
    for wanted in candidates(cluster.gpus, choices):
        try:
            found.feasible.append(judge(shape, cluster, global_batch, wanted, techniques))
        except ValueError as error:
            reason = str(error).split(" is ")[0]
            failures.setdefault(reason, Failure(reason, f"{told(wanted)}: {error}")).count += 1
    found.feasible.sort(key=lambda p: (p.duration.total, p.memory.total, p.communication.total))
    found.failures = sorted(failures.values(), key=lambda f: -f.count)
    return found


def candidates(gpus: int, choices: Choices) -> Iterator[dict[str, Any]]:
    """The fields of every layout to judge: all ways to write the number of devices as dp * tp * pp, times all other choices."""
    for tp, pp in itertools.product(divisors(gpus), repeat=2):
        if gpus % (tp * pp):
            continue
        axes = {"dp": gpus // (tp * pp), "tp": tp, "pp": pp}
        if any(allowed is not None and axes[name] not in allowed for name, allowed in _axes(choices)):
            continue
        schedules = choices.schedule if pp > 1 else choices.schedule[:1]
        rest = (choices.zero_stage, choices.precision, choices.recompute, choices.batch, schedules)
        for zero_stage, precision, recompute, batch, schedule in itertools.product(*rest):
            settings = {"zero_stage": zero_stage, "precision": precision, "recompute": recompute}
            yield {**axes, **settings, "batch": batch, "schedule": schedule}


def _axes(choices: Choices) -> tuple[tuple[str, tuple[int, ...] | None], ...]:
    return ("dp", choices.dp), ("tp", choices.tp), ("pp", choices.pp)


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def told(wanted: dict[str, Any]) -> str:
    """A candidate in a few words."""
    recompute = ", recompute" if wanted["recompute"] else ""
    interleaved = f", {wanted['schedule']}" if CHUNKS[wanted["schedule"]] > 1 else ""
    axes = f"dp {wanted['dp']}, tp {wanted['tp']}, pp {wanted['pp']}, ZeRO-{wanted['zero_stage']}"
    return f"{axes}, {wanted['precision']}{recompute}{interleaved}, micro-batch {wanted['batch']}"


def judge(
    shape: ModelShape, cluster: Cluster, global_batch: int, wanted: dict[str, Any], techniques: Techniques
) -> Plan:
    """What is predicted of one candidate. ValueError, whose subject is the reason, for one that cannot be run."""
    batch, dp = wanted["batch"], wanted["dp"]
    rest = f"a multiple of dp * micro-batch ({dp} * {batch})"
    require(global_batch % (dp * batch) == 0, "global_batch", global_batch, rest)
    fields = {name: value for name, value in wanted.items() if name != "batch"}
    layout = Layout(**fields, micro_batches=global_batch // (dp * batch))
    layout.require_fits(shape.sizes, cluster.gpus)
    held = memory(shape, layout, batch, techniques)
    if held.total > cluster.usable:
        raise ValueError(f"memory of a rank is {held.total:,} bytes, but should be at most {int(cluster.usable):,}")
    took = duration(shape, layout, batch, cluster, techniques)
    return Plan(
        layout,
        batch,
        held,
        communication(shape, layout, batch, techniques),
        took,
        bubble_fraction(layout),
        global_batch * shape.sizes.seq_len / took.total,
        shape.step_flops(global_batch, layout.recompute) / cluster.gpus / took.total,
    )
