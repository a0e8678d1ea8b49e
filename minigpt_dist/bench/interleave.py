"""Fair turns: several actions timed in the same processes, so that whatever else the machine does hits all alike.

Owns the order of turns and the clock. Leaves what the seconds mean to `comparison`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

Seconds = dict[str, list[float]]


def interleaved(
    actions: Mapping[str, Callable[[], object]],
    rounds: int,
    calls: int = 1,
    *,
    warm_up: int = 1,
    before: Callable[[], object] = lambda: None,
) -> Seconds:
    """Seconds a call of every action: one number a round, the mean over a turn of `calls` calls.

    Each round starts with another action, so that none always follows the same one's heat. `before` runs ahead of every
    turn and is not timed (a barrier, tidying up); the first `warm_up` calls of an action are not timed either.
    """
    for action in actions.values():
        for _ in range(warm_up):
            before()
            action()
    names = list(actions)
    seconds: Seconds = {name: [] for name in names}
    for turn in range(rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            action = actions[name]
            before()
            began = time.perf_counter()
            for _ in range(calls):
                action()
            seconds[name].append((time.perf_counter() - began) / calls)
    return seconds


def slowest(ranks: Sequence[Seconds]) -> Seconds:
    """Each round's time on the rank that took longest."""
    return {name: [max(values) for values in zip(*(rank[name] for rank in ranks), strict=True)] for name in ranks[0]}
