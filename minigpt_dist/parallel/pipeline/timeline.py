"""What a schedule costs: start and end of every action, idle time, activations held, without running anything.

Owns the arithmetic, of predicted and of measured times alike. Leaves the pictures to `gantt.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from minigpt_dist.parallel.pipeline.schedule import Action, Schedule, stages_of

Cost = Callable[[Action], float]


class Span(NamedTuple):
    """An action with its start and end, in the unit of the costs (or in seconds, where measured)."""

    action: Action
    start: float
    end: float


def unit_cost(action: Action) -> float:
    """1 for a forward, 2 for a backward: it computes two products where a forward computes one."""
    return 1.0 if action.kind == "F" else 2.0


def needs(action: Action, stages: int) -> Action | None:
    """The action on another stage (or the own forward) that must have ended before this one can start."""
    if action.kind == "F":
        return Action("F", action.stage - 1, action.micro) if action.stage else None
    if action.stage == stages - 1:
        return Action("F", action.stage, action.micro)
    return Action("B", action.stage + 1, action.micro)


def simulate(schedule: Schedule, cost: Cost = unit_cost) -> list[list[Span]]:
    """Every rank does its actions in order, each as early as it can; messages take no time. [rank][position].

    ValueError if the ranks would wait for each other for ever, naming who waits for what.
    """
    stages, ended = stages_of(schedule), dict[Action, float]()
    spans: list[list[Span]] = [[] for _ in schedule]
    while any(len(done) < len(actions) for done, actions in zip(spans, schedule, strict=True)):
        moved = False
        for done, actions in zip(spans, schedule, strict=True):
            while len(done) < len(actions):
                action = actions[len(done)]
                before = needs(action, stages)
                if before is not None and before not in ended:
                    break
                start = max(done[-1].end if done else 0.0, ended[before] if before is not None else 0.0)
                ended[action] = start + cost(action)
                done.append(Span(action, start, ended[action]))
                moved = True
        if not moved:
            stuck = [
                f"rank {r} at {a[len(d)]}"
                for r, (d, a) in enumerate(zip(spans, schedule, strict=True))
                if len(d) < len(a)
            ]
            raise ValueError(f"the schedule is stuck: {', '.join(stuck)}, but should have an action that can start")
    return spans


def busy(spans: Sequence[Span]) -> float:
    """The time in which one rank runs something."""
    return sum(span.end - span.start for span in spans)


def bubble_fraction(spans: Sequence[Sequence[Span]]) -> float:
    """The share of all ranks' time, from the first start to the last end, in which they do nothing."""
    everything = [span for rank in spans for span in rank]
    whole = (max(s.end for s in everything) - min(s.start for s in everything)) * len(spans)
    return 1.0 - busy(everything) / whole


def ideal_bubble(ranks: int, micros: int, chunks: int = 1) -> float:
    """(N-1) / (M*V + N-1), N ranks, M micro-batches, V stages a rank: the fraction for equal stages (GPipe, section 2.3)."""
    return (ranks - 1) / (micros * chunks + ranks - 1)


def peak_live(actions: Sequence[Action]) -> int:
    """The most activations a rank holds at once: forwards done whose backward is not."""
    live = peak = 0
    for action in actions:
        live += 1 if action.kind == "F" else -1
        peak = max(peak, live)
    return peak
