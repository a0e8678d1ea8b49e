"""Layouts and their mesh: what cannot be is refused, every rank has one place, and groups are the same seen from every rank."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from minigpt_dist import ModelConfig
from minigpt_dist.launch import run_world
from minigpt_dist.layout import CHUNKS, Layout
from minigpt_dist.parallel.collectives import all_reduce_sum, world
from minigpt_dist.parallel.mesh import AXES, Coordinates, Mesh, coordinates_of, rank_of, ranks_along
from minigpt_dist.parallel.pipeline import SCHEDULES


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dp": 0}, "dp is 0, but should be a whole number of at least 1"),
        ({"tp": True}, "tp is True, but should be a whole number"),
        ({"zero_stage": 4}, "zero_stage is 4, but should be one of 0, 1, 2, 3"),
        ({"precision": "int8"}, "precision is 'int8', but should be one of float32"),
        ({"recompute": "yes"}, "recompute is 'yes', but should be True or False"),
        ({"offload": "tape"}, "offload is 'tape', but should be one of none, memory, disk"),
        ({"offload": "disk", "zero_stage": 0}, "offload is 'disk', but should be 'none' where zero_stage is 0"),
        ({"schedule": "zigzag"}, "schedule is 'zigzag', but should be one of gpipe, 1f1b, interleaved"),
        ({"zero_stage": 2, "pp": 2}, r"zero_stage is 2, but should be 0 or 1 where pp is above 1 \(2\), as a stage"),
        (
            {"schedule": "interleaved", "pp": 2, "micro_batches": 3},
            r"micro_batches is 3, but should be a multiple of pp",
        ),
    ],
)
def test_a_layout_that_cannot_be_is_refused_with_the_reason(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Layout(**options)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (Layout(dp=2), r"dp \* tp \* pp = 2 \* 1 \* 1 is 2, but should be 4, the number of ranks"),
        (Layout(dp=1, tp=4), r"num_heads is 6, but should be a multiple of tp \(4\)"),
        (
            Layout(dp=1, pp=4, schedule="interleaved", micro_batches=4),
            "stages is 8, but should be at most 5: an embedding",
        ),
    ],
)
def test_a_layout_that_does_not_fit_the_model_is_refused(layout: Layout, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layout.require_fits(ModelConfig(embed_dim=24, num_heads=6, num_layers=3), 4)


def test_a_vocabulary_is_padded_up_to_equal_parts() -> None:
    assert [Layout(tp=tp).padded_vocab(64) for tp in (1, 2, 3, 8)] == [64, 64, 66, 64]


def test_the_schedules_are_the_pipelines_own() -> None:
    assert set(CHUNKS) == set(SCHEDULES)


CUBES = [Layout(dp=dp, tp=tp, pp=pp) for dp, tp, pp in itertools.product((1, 2, 3), repeat=3)]


def test_every_rank_has_one_place_and_every_place_one_rank() -> None:
    for layout in CUBES:
        places = [coordinates_of(layout, rank) for rank in range(layout.world_size)]
        assert [rank_of(layout, place) for place in places] == list(range(layout.world_size))
        assert len(set(places)) == layout.world_size


def test_tensor_ranks_are_neighbours_and_stages_are_farthest_apart() -> None:
    layout = Layout(dp=2, tp=2, pp=2)
    assert [ranks_along(layout, 0, (axis,)) for axis in AXES] == [[0, 4], [0, 2], [0, 1]]
    assert ranks_along(layout, 5, ("pp", "tp")) == [0, 1, 4, 5]


@pytest.mark.parametrize("call", [lambda m: coordinates_of(m, 8), lambda m: rank_of(m, Coordinates(0, 2, 0))])
def test_a_rank_or_place_outside_the_layout_is_refused(call: Any) -> None:
    with pytest.raises(ValueError, match="but should be 0 to"):
        call(Layout(dp=2, tp=2, pp=2))


def mesh_body(dp: int, tp: int, pp: int) -> dict[str, list[int]]:
    """Per set of axes: [sum over the group of 2^rank, the group's size, this rank's index in it]."""
    mesh = Mesh(Layout(dp=dp, tp=tp, pp=pp))
    seen = {}
    for axes in (("pp",), ("dp",), ("tp",), ("tp", "pp")):
        group = mesh.group(*axes)
        seen["+".join(axes)] = [int(all_reduce_sum(torch.tensor(2**mesh.rank), group)), *world(group)]
    return seen


@pytest.mark.parametrize(
    "cube", [(1, 1, 1), pytest.param((2, 1, 2), marks=pytest.mark.slow), (3, 1, 1), (2, 2, 2)], ids=str
)
def test_a_sum_over_a_group_is_that_of_its_ranks(cube: tuple[int, int, int]) -> None:
    layout = Layout(*cube)
    for rank, seen in enumerate(run_world(mesh_body, layout.world_size, *cube, deadline_s=60)):
        for axes, found in seen.items():
            ranks = ranks_along(layout, rank, axes.split("+"))
            assert found == [sum(2**r for r in ranks), len(ranks), ranks.index(rank)]


def refusal(make: Callable[[], object]) -> str:
    try:
        make()
    except ValueError as error:
        return str(error)
    return "accepted"


def refused_body() -> list[str]:
    small = Layout(dp=2)
    makes = (lambda: Mesh(Layout(dp=3)), lambda: Mesh(small, [("cp",)]), lambda: Mesh(small).group("dp", "tp"))
    return [refusal(make) for make in makes]


def test_a_mesh_refuses_another_world_and_unknown_axes_on_every_rank() -> None:
    for said in run_world(refused_body, 2):
        assert said[0] == "the layout's number of ranks is 3, but should be 2, that of the world"
        assert said[1] == "axes are ('cp',), but should be different ones of pp, dp, tp"
        assert said[2].startswith(
            "axes are ('dp', 'tp'), but should be among those that the mesh was made with: pp; dp; tp; pp, tp"
        )
