"""Shards without ranks: where slices begin and end, what a slice's state says, what it refuses, which weights it takes in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from minigpt_dist.parallel.flat import FlatBuffer, FlatLayout, FlatParameters, even_bounds
from minigpt_dist.parallel.offload import Offload
from minigpt_dist.parallel.stages.shard import Shard
from minigpt_dist.parallel.stages.stage1 import Stage1
from minigpt_dist.parallel.stages.stage2 import Stage2
from minigpt_dist.parallel.stages.stage3 import Stage3

STAGES = (Stage1, Stage2, Stage3)
SIZES = (3, 4, 1, 2)  # 10 elements: slices of 4, 4 and 2 on three ranks, the third with 2 of padding


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """Elements 1, 2, 3, ... in the order of the flat vector."""
    return [nn.Parameter(part.clone()) for part in torch.arange(1, 11, dtype=dtype).split(SIZES)]


def shard(stage: type[Any], rank: int, world_size: int = 3, dtype: torch.dtype = torch.float32) -> Shard:
    made: Shard = stage(parameters(dtype), world_size, rank, False)
    return made


@pytest.mark.parametrize(
    ("total", "parts", "bounds"),
    [(10, 3, [0, 4, 8, 12]), (9, 3, [0, 3, 6, 9]), (1, 3, [0, 1, 2, 3]), (0, 2, [0, 0, 0])],
)
def test_the_cuts_are_even_and_the_last_slices_are_padded(total: int, parts: int, bounds: list[int]) -> None:
    assert even_bounds(total, parts) == bounds


def test_a_layout_lays_parameters_end_to_end() -> None:
    flat = FlatLayout(parameters(), 3)
    assert (flat.offsets, flat.numels, flat.total, flat.padded) == ([0, 3, 7, 8], [3, 4, 1, 2], 10, 12)


@pytest.mark.parametrize(
    ("lo", "hi", "pieces", "cuts"),
    [
        (0, 4, [(0, 0, 3), (1, 3, 4)], [0, 4, 4, 4]),
        (4, 8, [(1, 0, 3), (2, 3, 4)], [0, 0, 4, 4]),
        (8, 12, [(3, 0, 2)], [0, 0, 0, 4]),
        (3, 9, [(1, 0, 4), (2, 4, 5), (3, 5, 6)], [0, 1, 5, 6]),
        (5, 5, [], [0, 0, 0, 0]),
    ],
)
def test_a_part_of_the_vector_is_these_pieces_of_these_ranks(
    lo: int, hi: int, pieces: list[tuple[int, int, int]], cuts: list[int]
) -> None:
    flat = FlatLayout(parameters(), 3)
    assert list(flat.pieces(lo, hi)) == pieces
    assert flat.cuts(lo, hi) == cuts


@pytest.mark.parametrize("made", [FlatParameters, FlatBuffer])
def test_parameters_keep_their_values_and_padding_is_zero(made: type[FlatParameters]) -> None:
    assert made(parameters(), 3).data.tolist() == [*range(1, 11), 0, 0]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    ("world_size", "rank", "offset", "master"),
    [
        (3, 0, 0, [1, 2, 3, 4]),
        (3, 1, 4, [5, 6, 7, 8]),
        (3, 2, 8, [9, 10]),
        (4, 3, 9, [10]),
        (8, 6, 10, []),
        (1, 0, 0, [*range(1, 11)]),
    ],
)
def test_a_state_says_which_elements_it_has(
    stage: type[Any], world_size: int, rank: int, offset: int, master: list[int]
) -> None:
    state = shard(stage, rank, world_size).state_dict()
    assert (state["offset"], state["numel"], state["total"]) == (offset, len(master), 10)
    assert state["master"].tolist() == master
    assert state["exp_avg"].tolist() == state["exp_avg_sq"].tolist() == [0] * len(master)
    assert state["steps"] == [0, 0, 0, 0]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    ("dtype", "master"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.float64, torch.float64)],
)
def test_the_state_is_of_32_bits_or_the_parameters_64(
    stage: type[Any], dtype: torch.dtype, master: torch.dtype
) -> None:
    made = shard(stage, 1, 3, dtype)
    assert {made.master.dtype, made.exp_avg.dtype, made.exp_avg_sq.dtype} == {master}


@pytest.mark.parametrize("offload", [None, Offload("memory", chunk=3)])
@pytest.mark.parametrize("stage", STAGES)
def test_a_state_comes_back_with_the_counts_of_what_the_rank_owns(stage: type[Any], offload: Offload | None) -> None:
    state = {**shard(stage, 1).state_dict(), "steps": [1, 2, 3, 4]}
    state.update({name: torch.rand(4) for name in ("master", "exp_avg", "exp_avg_sq")})
    loaded = stage(parameters(), 3, 1, False, offload)
    loaded.load_state_dict(state)
    back = loaded.state_dict()
    assert back.pop("steps") == [0, 2, 3, 0]
    assert all(torch.equal(torch.as_tensor(back[name]), torch.as_tensor(state[name])) for name in back)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"offset": 0}, "offset of the optimizer's shard is 0, but should be 4"),
        ({"numel": 3}, "numel of the optimizer's shard is 3, but should be 4"),
        ({"total": 11}, "total of the optimizer's shard is 11, but should be 10"),
        ({"master": None}, "master of the optimizer's shard is not a tensor of 4 elements"),
        ({"exp_avg": torch.zeros(3)}, "exp_avg of the optimizer's shard is not"),
        ({"exp_avg_sq": torch.zeros(2, 2)}, "exp_avg_sq of the optimizer's shard is not"),
        ({"steps": [1, 2, 3]}, "steps of the optimizer's shard has 3 entries, but should have 4"),
    ],
)
def test_a_state_of_another_slice_is_refused_and_changes_nothing(wrong: dict[str, Any], message: str) -> None:
    mine = shard(Stage1, 1)
    with pytest.raises(ValueError, match=message):
        mine.load_state_dict({**mine.state_dict(), "master": torch.zeros(4), **wrong})
    assert mine.master.tolist() == [5, 6, 7, 8]


@pytest.mark.parametrize("offload", [None, Offload("memory", chunk=1)])
def test_weights_are_taken_in_from_where_they_begin_and_only_where_they_are_new(offload: Offload | None) -> None:
    """The master keeps what bfloat16 cannot hold, unless the parameter was written."""
    mine = Stage1(parameters(torch.bfloat16), 3, 1, False, offload)
    mine.master.add_(1e-4)
    mine.adopt(torch.tensor([6.0, 9.0], dtype=torch.bfloat16), 1)
    assert mine.master.tolist() == torch.tensor([5 + 1e-4, 6 + 1e-4, 9, 8 + 1e-4]).tolist()


@pytest.mark.parametrize("offload", [None, Offload("memory", chunk=1)])
def test_the_master_is_cast_into_a_target_from_where_it_begins(offload: Offload | None) -> None:
    target = torch.zeros(2)
    Stage1(parameters(), 3, 1, False, offload).cast_into(target, 1)
    assert target.tolist() == [6, 7]


@pytest.mark.parametrize("stage", STAGES)
def test_a_step_updates_runs_of_equal_options_and_counts_what_was_used(stage: type[Any]) -> None:
    """Against the same update made parameter by parameter; the second one is used by no rank."""
    made = shard(stage, 0, 1)
    groups = [{"lr": lr, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1} for lr in (0.1, 0.2)]
    group_of = {p: groups[i // 3] for i, p in enumerate(made.flat.params)}
    grad = torch.linspace(-1, 1, 10)
    for skipped in ([False] * 4, [False, True, False, False], [False] * 4):
        made._skipped = skipped
        made.update(grad.clone(), group_of)
    wanted = [nn.Parameter(part.detach().clone()) for part in parameters()]
    for i, (p, g) in enumerate(zip(wanted, grad.split(SIZES), strict=True)):
        optimizer = torch.optim.AdamW([p], **groups[i // 3])
        for _ in range(2 if i == 1 else 3):
            p.grad = g.clone()
            optimizer.step()
    assert made.steps == [3, 2, 3, 3]
    assert made.master.tolist() == torch.cat([p.detach() for p in wanted]).tolist()


@pytest.mark.parametrize(
    ("skipped", "steps", "calls"),
    [
        ([False] * 4, [0, 0, 0, 0], [(0, 8, 1), (8, 10, 1)]),  # the last one has options of its own
        ([False, True, False, False], [0, 0, 0, 0], [(0, 3, 1), (7, 8, 1), (8, 10, 1)]),
        ([False] * 4, [0, 1, 1, 1], [(0, 3, 1), (3, 8, 2), (8, 10, 2)]),
        ([True] * 4, [0, 0, 0, 0], []),
    ],
)
def test_neighbours_of_equal_options_and_counts_are_one_call(
    skipped: list[bool], steps: list[int], calls: list[tuple[int, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, seen = shard(Stage1, 0, 1), list[tuple[int, int, int]]()
    made._skipped, made.steps = skipped, list(steps)
    options = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
    group_of = {p: options if i < 3 else dict(options) for i, p in enumerate(made.flat.params)}
    monkeypatch.setattr(made.state, "adamw_", lambda lo, hi, grad, step, **_: seen.append((lo, hi, step)))
    made.update(torch.ones(10), group_of)
    assert seen == calls


def test_a_parameter_that_no_rank_used_is_told_from_one_with_a_gradient_of_zero() -> None:
    made = shard(Stage1, 1)
    assert made._unused_everywhere(torch.tensor([-0.0, 0.0, 1.0, 0.0]), [True, False, False, True]) == [True, False]
    assert made._unused_everywhere(torch.tensor([-1.0, 0.0, 1.0, -0.0]), [True, False, False, True]) == [False, True]
    assert made._unused_everywhere(torch.tensor([-0.0, 0.0, 1.0, -0.0]), [True] * 4) == [False, False]
