"""Collectives: sums in rank order, bits independent of where shards are cut, uneven and empty shards, bytes of any length."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given
from hypothesis import strategies as st

from minigpt_dist.launch import World, ledger
from minigpt_dist.parallel import collectives
from minigpt_dist.parallel.collectives import (
    ONE_ROUND_BYTES,
    all_gather_slices,
    all_gather_start,
    all_reduce_max,
    all_reduce_start,
    all_reduce_sum,
    barrier,
    broadcast,
    exchange,
    reduce_scatter_start,
    reduce_scatter_sum,
    world,
)


@pytest.fixture(scope="module", params=[4, 3, 2, 1])
def ranks(request: pytest.FixtureRequest) -> Iterator[World]:
    with World(request.param, deadline_s=60) as live:
        yield live


def _addend(seed: int, rank: int, numel: int) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed * 31 + rank)) * 10.0**rank


def reduce_body(seed: int, bounds: list[int]) -> torch.Tensor:
    flat = _addend(seed, dist.get_rank(), bounds[-1])
    kept = flat.clone()
    mine = reduce_scatter_sum(flat, bounds)
    assert torch.equal(flat, kept)  # a rank's own precondition: the input is not modified
    return mine


def gather_body(seed: int, bounds: list[int], one_round_bytes: int) -> torch.Tensor:
    rank = dist.get_rank()
    flat = torch.full((bounds[-1],), -1.0)
    flat[bounds[rank] : bounds[rank + 1]] = _addend(seed, 0, bounds[-1])[bounds[rank] : bounds[rank + 1]]
    with mock.patch.object(collectives, "ONE_ROUND_BYTES", one_round_bytes):
        all_gather_slices(flat, bounds)
    return flat


def exchange_body() -> list[bytes]:
    return exchange(bytes(range(dist.get_rank())))


def empty_exchange_body() -> list[bytes]:
    return exchange(b"")


def broadcast_body(*src: int) -> torch.Tensor:
    t = torch.full((3,), float(dist.get_rank()))
    broadcast(t, *src)
    return t


def in_rank_order(seed: int, world_size: int, numel: int) -> torch.Tensor:
    """((g0 + g1) + g2) + ..., in float32."""
    total = _addend(seed, 0, numel)
    for rank in range(1, world_size):
        total = total + _addend(seed, rank, numel)
    return total


def world_size_of(ranks: World) -> int:
    return len(ranks.run(exchange_body))


CUTS = st.lists(st.integers(0, 40), min_size=3, max_size=3)


@given(seed=st.integers(0, 99), cuts=CUTS, numel=st.integers(0, 40))
@example(seed=0, cuts=[0, 0, 0], numel=0)
@example(seed=0, cuts=[10, 20, 30], numel=40)
@example(seed=1, cuts=[0, 40, 40], numel=40)
def test_reduced_slices_are_the_sum_in_rank_order_wherever_they_are_cut(
    ranks: World, seed: int, cuts: list[int], numel: int
) -> None:
    N = world_size_of(ranks)
    bounds = [0, *sorted(min(c, numel) for c in cuts[: N - 1]), numel]
    assert torch.equal(torch.cat(ranks.run(reduce_body, seed, bounds)), in_rank_order(seed, N, numel))


@given(seed=st.integers(0, 99), cuts=CUTS, numel=st.integers(0, 40), limit=st.sampled_from([0, 80, ONE_ROUND_BYTES]))
@example(seed=0, cuts=[10, 20, 30], numel=40, limit=0)
@example(seed=0, cuts=[10, 20, 30], numel=40, limit=ONE_ROUND_BYTES)
@example(seed=1, cuts=[0, 40, 40], numel=40, limit=ONE_ROUND_BYTES)
def test_gathered_slices_reach_every_rank_wherever_they_are_cut(
    ranks: World, seed: int, cuts: list[int], numel: int, limit: int
) -> None:
    bounds = [0, *sorted(min(c, numel) for c in cuts[: world_size_of(ranks) - 1]), numel]
    assert all(torch.equal(flat, _addend(seed, 0, numel)) for flat in ranks.run(gather_body, seed, bounds, limit))


def test_bytes_of_unequal_length_arrive_in_rank_order(ranks: World) -> None:
    results = ranks.run(exchange_body)
    assert all(result == [bytes(range(rank)) for rank in range(len(results))] for result in results)


def test_nothing_can_be_exchanged_too(ranks: World) -> None:
    assert all(not any(result) for result in ranks.run(empty_exchange_body))


def test_broadcast_copies_the_source(ranks: World) -> None:
    last = world_size_of(ranks) - 1
    assert all(t.tolist() == [float(last)] * 3 for t in ranks.run(broadcast_body, last))
    assert all(t.tolist() == [0.0] * 3 for t in ranks.run(broadcast_body))


def test_without_a_process_group_there_is_one_rank() -> None:
    assert world() == (1, 0)
    assert exchange(b"x") == [b"x"]
    assert all_reduce_start(torch.ones(1)) is None
    for call in (broadcast, all_reduce_sum, all_reduce_max):
        call(torch.ones(1))
    barrier()


def calls_body() -> dict[str, list[str]]:
    """What each function asks of the backend, as the ledger saw it."""
    N, seen = dist.get_world_size(), {}
    even, uneven = [i * 2 for i in range(N + 1)], [0, *(i + 1 for i in range(N))]
    large = [i * (ONE_ROUND_BYTES // 4) for i in range(N + 1)]
    for name, call in {
        "sum": lambda: all_reduce_sum(torch.ones(1)),
        "max": lambda: all_reduce_max(torch.ones(1)),
        "start": lambda: (work := all_reduce_start(torch.ones(1))) and work.wait(),
        "broadcast": lambda: broadcast(torch.ones(1)),
        "barrier": barrier,
        "reduce": lambda: reduce_scatter_sum(torch.ones(2 * N), even),
        "gather": lambda: all_gather_slices(torch.ones(2 * N), even),
        "gather of one owner": lambda: all_gather_slices(torch.ones(N), [0] + [N] * N),
        "gather at the limit": lambda: all_gather_slices(
            torch.ones(ONE_ROUND_BYTES // 4), [0] * N + [ONE_ROUND_BYTES // 4]
        ),
        "large gather": lambda: all_gather_slices(torch.ones(large[-1]), large),
        "uneven gather": lambda: all_gather_slices(torch.ones(uneven[-1]), uneven),
        "exchange": lambda: exchange(b"x"),
        "exchange of nothing": lambda: exchange(b""),
    }.items():
        ledger.clear()
        call()
        seen[name] = [entry["op"] for entry in ledger.entries()]
    return seen


def test_each_function_is_the_one_message_that_it_says(ranks: World) -> None:
    """Twice would be the right numbers, or wrong ones; nothing at all on one rank."""
    N = world_size_of(ranks)
    wanted = {
        "sum": ["all_reduce"],
        "max": ["all_reduce"],
        "start": ["all_reduce"],
        "broadcast": ["broadcast"],
        "barrier": ["barrier"],
        "reduce": ["all_to_all_single"],
        "gather": ["all_to_all_single"],
        "gather of one owner": ["broadcast"],
        "gather at the limit": ["broadcast"],
        "large gather": ["broadcast"] * N,
        "uneven gather": ["all_to_all_single"],
        "exchange": ["all_gather"] * 2,
        "exchange of nothing": ["all_gather"],
    }
    assert ranks.run(calls_body) == [wanted if N > 1 else {name: [] for name in wanted}] * N


def test_reduction_without_a_process_group_copies() -> None:
    flat = torch.arange(3.0)
    mine: Any = reduce_scatter_sum(flat, [0, 3])
    assert mine.data_ptr() != flat.data_ptr()


def inbox_body() -> list[Any]:
    """A sum received into memory that the caller gave; two sums and a gather under way at once."""
    N, rank = world()
    bounds = [2 * i for i in range(N + 1)]
    inbox, flat = torch.full((2 * N,), -1.0), torch.arange(2.0 * N) + rank
    first, second = reduce_scatter_start(flat, bounds, None, inbox), reduce_scatter_start(flat * 2, bounds)
    gathered = torch.full((2 * N,), float(rank))
    wait = all_gather_start(gathered, bounds)
    a, b = first(), second()
    wait()
    within = a.untyped_storage().data_ptr() == inbox.untyped_storage().data_ptr()
    return [within, a.tolist(), b.tolist(), gathered.tolist()]


def test_exchanges_may_be_under_way_at_once_and_a_sum_may_come_into_given_memory(ranks: World) -> None:
    N = world_size_of(ranks)
    for rank, (within, once, twice, gathered) in enumerate(ranks.run(inbox_body)):
        wanted = [float(sum(2 * rank + i + r for r in range(N))) for i in range(2)]
        assert (within, once, twice) == (N > 1, wanted, [2 * x for x in wanted])
        assert gathered == [float(r) for r in range(N) for _ in range(2)]
