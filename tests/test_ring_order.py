"""The model of gloo's ring has the bits of gloo itself, for sums over two ranks to five."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from minigpt_dist.launch import World
from minigpt_dist.verify.ring_order import ring_bounds, ring_sum

SIZES = (1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 40, 63, 64, 65, 100, 127, 1000, 1001, 4099, 29_824)


@pytest.fixture(scope="module", params=[*(pytest.param(N, marks=pytest.mark.peers) for N in (2, 3, 5)), 4])
def ranks(request: pytest.FixtureRequest) -> Iterator[World]:
    with World(request.param, deadline_s=60) as live:
        yield live


def addend(numel: int, rank: int, dtype: str) -> torch.Tensor:
    """Numbers of very different size, so that every change of order shows."""
    g = torch.Generator().manual_seed(numel * 31 + rank)
    exponents = torch.randint(-8, 8, (numel,), generator=g)
    return (torch.randn(numel, generator=g) * 2.0**exponents).to(getattr(torch, dtype))


def all_reduce_body(sizes: list[int], dtype: str) -> list[torch.Tensor]:
    tensors = [addend(n, dist.get_rank(), dtype) for n in sizes]
    for t in tensors:
        dist.all_reduce(t)
    return tensors


def reduce_scatter_body(sizes: list[int]) -> list[torch.Tensor]:
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # renamed in torch 2.13
    found = []
    for n in sizes:
        mine = torch.empty(n)
        scatter(mine, addend(n * dist.get_world_size(), dist.get_rank(), "float32"))
        found.append(mine)
    return found


def modelled(numel: int, world_size: int, dtype: str = "float32") -> torch.Tensor:
    return ring_sum([addend(numel, rank, dtype) for rank in range(world_size)])


@pytest.mark.parametrize("dtype", ["float32", pytest.param("float64", marks=pytest.mark.peers)])
def test_a_modelled_all_reduce_has_gloos_bits_on_every_rank(ranks: World, dtype: str) -> None:
    right = [modelled(n, ranks.world_size, dtype) for n in SIZES]
    for tensors in ranks.run(all_reduce_body, list(SIZES), dtype):
        assert [n for n, t, r in zip(SIZES, tensors, right, strict=True) if not torch.equal(t, r)] == []


def test_a_modelled_reduce_scatter_has_gloos_bits(ranks: World) -> None:
    right = [modelled(n * ranks.world_size, ranks.world_size).split(n) for n in SIZES]
    for rank, slices in enumerate(ranks.run(reduce_scatter_body, list(SIZES))):
        assert [n for n, t, r in zip(SIZES, slices, right, strict=True) if not torch.equal(t, r[rank])] == []


@pytest.mark.peers
@pytest.mark.parametrize("extra", [-1, 0, 1, 12_345])
def test_vectors_of_many_segments_have_gloos_bits(ranks: World, extra: int) -> None:
    numel = 2 * ranks.world_size * 262_144 + extra  # about two segments of 1 MiB a rank, and more
    assert torch.equal(ranks.run(all_reduce_body, [numel], "float32")[0][0], modelled(numel, ranks.world_size))


@pytest.mark.parametrize("world_size", [3, 4, 5])
def test_rank_order_gives_other_bits_than_the_ring(world_size: int) -> None:
    total = addend(1000, 0, "float32")
    for rank in range(1, world_size):
        total += addend(1000, rank, "float32")
    assert not torch.equal(total, modelled(1000, world_size))


@given(numel=st.integers(0, 5_000_000), world_size=st.integers(1, 16))
def test_pieces_of_the_ring_cover_the_vector_without_overlap(numel: int, world_size: int) -> None:
    bounds = ring_bounds(numel, world_size)
    assert bounds == sorted(bounds)
    assert (bounds[0], bounds[-1], len(bounds)) == (0, numel, world_size + 1)


@pytest.mark.parametrize("tensors", [[], [torch.zeros(2), torch.zeros(3)], [torch.zeros(2), torch.zeros(2).double()]])
def test_unlike_tensors_are_refused(tensors: list[torch.Tensor]) -> None:
    with pytest.raises(ValueError, match="shapes and dtypes, but should be of one"):
        ring_sum(tensors)
