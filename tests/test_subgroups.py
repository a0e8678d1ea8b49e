"""Collectives of a part of the ranks: a group exchanges among its own ranks alone, and groups of the same ranks are told apart."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from minigpt_dist.launch import run_world
from minigpt_dist.parallel.collectives import (
    ONE_ROUND_BYTES,
    alike,
    all_gather_slices,
    all_gather_start,
    all_reduce_max,
    all_reduce_start,
    all_reduce_sum,
    barrier,
    broadcast,
    exchange,
    reduce_scatter_sum,
    subgroup,
    world,
)


def halves_body() -> dict[str, Any]:
    """Even and odd ranks apart, in groups of their own: every function within the group, and what it brought."""
    N, rank = world()
    own = list(range(rank % 2, N, 2))
    group, twin = subgroup(own), alike(subgroup(own))
    n, place = world(group)
    bounds = [i * (i + 1) for i in range(n + 1)]
    large = [0, *[ONE_ROUND_BYTES] * n]  # more than one round's, all of it the first's
    mine, flat, long = (
        torch.full((bounds[-1],), float(rank)),
        torch.full((bounds[-1],), -1.0),
        torch.full((large[-1],), -1.0),
    )
    flat[bounds[place] : bounds[place + 1]] = float(rank)
    long[large[place] : large[place + 1]] = float(rank)
    sent = torch.tensor(float(rank))
    broadcast(sent, n - 1, twin)
    started = torch.tensor(float(rank))
    work = all_reduce_start(started, group)
    if work is not None:
        work.wait()
    finish = all_gather_start(flat, bounds, group)
    finish()
    all_gather_slices(long, large, group)
    barrier(group)
    return {
        "ranks": [n, place],
        "sum": float(all_reduce_sum(torch.tensor(float(rank)), group)),
        "started": float(started),
        "max": float(all_reduce_max(torch.tensor(float(rank)), group)),
        "sent": float(sent),
        "reduced": reduce_scatter_sum(mine, bounds, group).tolist(),
        "gathered": flat.tolist(),
        "large": [long.min().item(), long.max().item()],
        "told": exchange(bytes([rank]), twin),
    }


def test_a_group_exchanges_among_its_own_ranks_alone() -> None:
    """Counted within the group: the last of the odd ranks is its rank 1, and rank 3 of the world."""
    for rank, seen in enumerate(run_world(halves_body, 4)):
        own = [rank % 2, rank % 2 + 2]
        place, total = rank // 2, float(sum(own))
        assert seen == {
            "ranks": [2, place],
            "sum": total,
            "started": total,
            "max": own[1],
            "sent": own[1],
            "reduced": [total] * (2 + 2 * place),
            "gathered": [float(own[0])] * 2 + [float(own[1])] * 4,
            "large": [own[0], own[0]],
            "told": [bytes([each]) for each in own],
        }


def groups_body() -> list[Any]:
    """Groups, what they are to each other, and two exchanges at once that are told apart by their groups."""
    N, rank = world()
    pair = subgroup([0, 1]) if rank < 2 else subgroup([2])
    other, twin = alike(None), alike(pair)  # the world's first: until then all ranks have made as many groups
    order = (pair, twin) if rank == 0 else (twin, pair)
    works = [all_reduce_start(torch.ones(1), group) for group in order]
    for work in works:
        if work is not None:
            work.wait()
    return [
        subgroup(range(N)) is None,
        dist.get_process_group_ranks(pair),
        twin is pair,
        dist.get_process_group_ranks(twin),
        other is None,
        world(other),
    ]


def test_another_group_of_the_same_ranks_is_another_where_there_is_more_than_one() -> None:
    first, second, third = run_world(groups_body, 3)
    assert first == [True, [0, 1], False, [0, 1], False, (3, 0)]
    assert second == [True, [0, 1], False, [0, 1], False, (3, 1)]
    assert third == [True, [2], True, [2], False, (3, 2)]
