"""Collectives made of sends: equal to gloo's own, exactly the bytes of the formula, and no wait without an end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from minigpt_dist.launch import RankDied, RankError, World, run_world
from minigpt_dist.parallel.p2p import Peers, SilentPeerError, all_reduce, direct, ring, tree
from minigpt_dist.verify.ring_order import ring_bounds

ALGORITHMS: dict[str, Callable[[torch.Tensor, Peers], torch.Tensor]] = {
    "ring": ring.all_reduce,
    "tree": tree.all_reduce,
    "auto": all_reduce,
}
DTYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int8", "complex64")
LENGTHS = [0, 1, 2, 3, 7, 64, 1001, 300_007]  # the last travels in several segments


@pytest.fixture(
    scope="module",
    params=[1, 2, 3, 4, pytest.param(5, marks=pytest.mark.slow), pytest.param(8, marks=pytest.mark.slow)],
)
def ranks(request: pytest.FixtureRequest) -> Iterator[World]:
    with World(request.param, deadline_s=60) as live:
        yield live


def addend(rank: int, numel: int, dtype: str) -> torch.Tensor:
    """Small whole numbers: their sums are exact in every dtype, so equal means equal in any order."""
    g = torch.Generator().manual_seed(rank)
    return torch.randint(-3, 4, (numel,), generator=g).to(getattr(torch, dtype))


def total(world_size: int, numel: int, dtype: str) -> torch.Tensor:
    return torch.stack([addend(r, numel, dtype) for r in range(world_size)]).sum(0).to(getattr(torch, dtype))


def all_reduce_body(algorithm: str, numel: int, dtype: str) -> dict[str, Any]:
    peers = Peers(timeout_s=30)
    value = addend(dist.get_rank(), numel, dtype)
    result = ALGORITHMS[algorithm](value, peers)
    return {"result": result, "in place": result is value, "sent": peers.bytes_sent}


def bits_body(numel: int, seed: int) -> list[torch.Tensor]:
    """Ours and gloo's sum of the same random numbers, cut where gloo cuts."""
    N, rank = dist.get_world_size(), dist.get_rank()
    value = torch.randn(numel, generator=torch.Generator().manual_seed(seed * 31 + rank)) * 10.0**rank
    theirs = value.clone()
    dist.all_reduce(theirs)
    return [ring.all_reduce(value, Peers(timeout_s=30), ring_bounds(numel, N)), theirs]


def cut_body(bounds: list[int]) -> dict[str, torch.Tensor]:
    rank, peers = dist.get_rank(), Peers(timeout_s=30)
    value = addend(rank, bounds[-1], "float32")
    kept = value.clone()
    mine = ring.reduce_scatter(value, bounds, peers)
    gathered = torch.zeros(bounds[-1])
    gathered[bounds[rank] : bounds[rank + 1]] = mine
    ring.all_gather(gathered, bounds, peers)
    return {"mine": mine, "gathered": gathered, "untouched": value == kept}


def broadcast_body(src: int, numel: int) -> torch.Tensor:
    return tree.broadcast(addend(dist.get_rank(), numel, "float32"), src, Peers(timeout_s=30))


def all_to_all_body() -> list[torch.Tensor]:
    """Rank r sends r*10 + s, s+r times, to rank s."""
    N, rank = dist.get_world_size(), dist.get_rank()
    outputs = [torch.zeros(rank + s) for s in range(N)]
    direct.all_to_all(outputs, [torch.full((rank + s,), rank * 10.0 + s) for s in range(N)], Peers(timeout_s=30))
    return outputs


def background_body() -> list[torch.Tensor]:
    """Three collectives under way at once, waited for in another order."""
    peers = Peers(timeout_s=30)
    handles = [peers.start(collective, addend(dist.get_rank(), n, "float32")) for n, collective in ORDER]
    return [handles[i].wait() for i in (2, 0, 1)]


ORDER = [(5, ring.all_reduce), (70_001, tree.all_reduce), (9, all_reduce)]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("numel", LENGTHS)
def test_all_reduce_is_the_sum_on_every_rank(ranks: World, algorithm: str, numel: int) -> None:
    wanted = total(ranks.world_size, numel, "float32")
    results = ranks.run(all_reduce_body, algorithm, numel, "float32")
    assert all(torch.equal(r["result"], wanted) and r["in place"] for r in results)


@pytest.mark.parametrize("algorithm", ["ring", "tree"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_dtype_is_added_in_its_own_arithmetic(ranks: World, algorithm: str, dtype: str) -> None:
    wanted = total(ranks.world_size, 13, dtype)
    assert all(torch.equal(r["result"], wanted) for r in ranks.run(all_reduce_body, algorithm, 13, dtype))


@pytest.mark.parametrize("numel", [0, 1, 5, 1001, 300_007])
def test_ring_has_the_bits_of_gloos_ring(ranks: World, numel: int) -> None:
    assert all(torch.equal(ours, gloos) for ours, gloos in ranks.run(bits_body, numel, 3))


def test_ring_sends_twice_the_message_times_n_minus_1_over_n(ranks: World) -> None:
    N, nbytes = ranks.world_size, 840 * 4  # 840 elements are cut evenly by 1 to 8
    assert [r["sent"] for r in ranks.run(all_reduce_body, "ring", 840, "float32")] == [2 * nbytes * (N - 1) // N] * N


def test_tree_sends_the_whole_message_up_once_and_down_once(ranks: World) -> None:
    sent = [r["sent"] for r in ranks.run(all_reduce_body, "tree", 840, "float32")]
    assert sum(sent) == 2 * 840 * 4 * (ranks.world_size - 1)
    assert max(sent) <= 840 * 4 * max(1, (ranks.world_size - 1).bit_length())


@given(data=st.data())
def test_uneven_and_empty_slices_are_summed_and_gathered(ranks: World, data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(0, 6), min_size=ranks.world_size, max_size=ranks.world_size))
    bounds = [sum(sizes[:r]) for r in range(len(sizes) + 1)]
    wanted = total(ranks.world_size, bounds[-1], "float32")
    for rank, result in enumerate(ranks.run(cut_body, bounds)):
        assert torch.equal(result["mine"], wanted[bounds[rank] : bounds[rank + 1]])
        assert torch.equal(result["gathered"], wanted)
        assert bool(result["untouched"].all())


@pytest.mark.parametrize("numel", [0, 1, 1001])
def test_broadcast_copies_any_source(ranks: World, numel: int) -> None:
    for src in range(ranks.world_size):
        assert all(torch.equal(t, addend(src, numel, "float32")) for t in ranks.run(broadcast_body, src, numel))


def test_all_to_all_delivers_messages_of_any_length(ranks: World) -> None:
    for rank, outputs in enumerate(ranks.run(all_to_all_body)):
        assert all(torch.equal(t, torch.full((rank + s,), s * 10.0 + rank)) for s, t in enumerate(outputs))


def test_collectives_in_the_background_end_in_the_order_of_their_calls(ranks: World) -> None:
    wanted = [total(ranks.world_size, ORDER[i][0], "float32") for i in (2, 0, 1)]
    assert all(all(map(torch.equal, seen, wanted)) for seen in ranks.run(background_body))


def absent_body(algorithm: str) -> dict[str, Any]:
    """Rank 2 never comes: what do the others learn?"""
    if dist.get_rank() == 2:
        return {}
    try:
        ALGORITHMS[algorithm](torch.ones(64), Peers(timeout_s=0.5))
    except SilentPeerError as error:
        return {"peer": error.peer, "message": str(error)}
    return {"message": "no error"}


def dying_body(numel: int) -> None:
    peers = Peers(timeout_s=20)
    ring.all_reduce(torch.ones(numel), peers)
    if dist.get_rank() == 1:
        raise SystemExit(3)
    ring.all_reduce(torch.ones(numel), peers)


@pytest.mark.parametrize("algorithm", ["ring", "tree"])
def test_a_silent_rank_is_named_within_the_time_limit(algorithm: str) -> None:
    told = [r for r in run_world(absent_body, 3, algorithm, deadline_s=30) if r]
    assert 2 in [r.get("peer") for r in told]
    assert any("rank 2 sent nothing, but should have sent" in r["message"] for r in told)


def test_a_rank_that_dies_between_two_collectives_ends_the_others() -> None:
    with pytest.raises((RankDied, RankError)):
        run_world(dying_body, 3, 1000, deadline_s=30)


def wrong_call(name: str) -> str:
    peers = Peers(timeout_s=5)
    value = torch.ones(6)
    calls: dict[str, Callable[[], object]] = {
        "strides": lambda: ring.all_reduce(torch.ones(3, 2).t(), peers),
        "bounds": lambda: ring.reduce_scatter(value, [0, 4, 3, 6], peers),
        "too few bounds": lambda: ring.all_gather(value, [0, 6], peers),
        "source": lambda: tree.broadcast(value, 2, peers),
        "algorithm": lambda: all_reduce(value, peers, algorithm="star"),
        "time limit": lambda: Peers(timeout_s=0),
        "messages": lambda: direct.all_to_all([value], [value, value], peers),
        "own message": lambda: direct.all_to_all([value, value], [value[:3], value[:3]], peers),
    }
    try:
        calls[name]()
    except ValueError as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize(
    "name", ["strides", "bounds", "too few bounds", "source", "algorithm", "time limit", "messages", "own message"]
)
def test_a_wrong_call_is_refused_before_anything_is_sent(name: str) -> None:
    with World(2, deadline_s=20) as world:
        assert all("but should be" in message for message in world.run(wrong_call, name)) or name == "own message"
