"""Collectives: sums in rank order, bits independent of where shards are cut, uneven and empty shards, bytes of any length."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given
from hypothesis import strategies as st

from minigpt_dist.launch import World
from minigpt_dist.parallel.collectives import all_gather_slices, broadcast, exchange, reduce_scatter_sum, world


@pytest.fixture(scope="module", params=[1, 2, 3, 4])
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


def gather_body(seed: int, bounds: list[int]) -> torch.Tensor:
    rank = dist.get_rank()
    flat = torch.full((bounds[-1],), -1.0)
    flat[bounds[rank] : bounds[rank + 1]] = _addend(seed, 0, bounds[-1])[bounds[rank] : bounds[rank + 1]]
    all_gather_slices(flat, bounds)
    return flat


def exchange_body() -> list[bytes]:
    return exchange(bytes(range(dist.get_rank())))


def empty_exchange_body() -> list[bytes]:
    return exchange(b"")


def broadcast_body(src: int) -> torch.Tensor:
    t = torch.full((3,), float(dist.get_rank()))
    broadcast(t, src)
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


@given(seed=st.integers(0, 99), cuts=CUTS, numel=st.integers(0, 40))
@example(seed=0, cuts=[10, 20, 30], numel=40)
@example(seed=1, cuts=[0, 40, 40], numel=40)
def test_gathered_slices_reach_every_rank_wherever_they_are_cut(
    ranks: World, seed: int, cuts: list[int], numel: int
) -> None:
    bounds = [0, *sorted(min(c, numel) for c in cuts[: world_size_of(ranks) - 1]), numel]
    assert all(torch.equal(flat, _addend(seed, 0, numel)) for flat in ranks.run(gather_body, seed, bounds))


def test_bytes_of_unequal_length_arrive_in_rank_order(ranks: World) -> None:
    results = ranks.run(exchange_body)
    assert all(result == [bytes(range(rank)) for rank in range(len(results))] for result in results)


def test_nothing_can_be_exchanged_too(ranks: World) -> None:
    assert all(not any(result) for result in ranks.run(empty_exchange_body))


def test_broadcast_copies_the_source(ranks: World) -> None:
    last = world_size_of(ranks) - 1
    assert all(t.tolist() == [float(last)] * 3 for t in ranks.run(broadcast_body, last))


def test_without_a_process_group_there_is_one_rank() -> None:
    assert world() == (1, 0)
    assert exchange(b"x") == [b"x"]


def test_reduction_without_a_process_group_copies() -> None:
    flat = torch.arange(3.0)
    mine: Any = reduce_scatter_sum(flat, [0, 3])
    assert mine.data_ptr() != flat.data_ptr()
