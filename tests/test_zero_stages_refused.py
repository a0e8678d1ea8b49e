"""ZeRO stages 2 and 3: wrong options, calls out of place, and ranks that fail or go their own way are named errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from zero_stage_cases import build, train

from minigpt_dist import ZeroOptimizer
from minigpt_dist.launch import LaunchError, RankError, run_world
from minigpt_dist.parallel.collectives import world


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stage": 4}, "stage is 4, but should be 1, 2 or 3"),
        ({"stage": 2, "bucket_mb": 0}, "bucket_mb is 0, but should be above 0"),
        ({"stage": 3, "module": [nn.Parameter(torch.ones(2))]}, "model is None, but should be the module"),
        (
            {"stage": 3, "module": [nn.Parameter(torch.ones(2))], "model": nn.Linear(2, 2)},
            "is of no module of the model",
        ),
    ],
)
def test_wrong_options_of_a_stage_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ZeroOptimizer(**{"module": nn.Linear(2, 2), "world_size": 1, "rank": 0, **options})


@pytest.mark.parametrize("stage", [2, 3])
def test_a_gradient_left_over_after_an_exchange_is_refused(stage: int) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    zero = ZeroOptimizer(model, 1, 0, stage=stage)
    model(torch.ones(1, 2)).sum().backward()
    with zero.no_sync():
        model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(ValueError, match="parameter 0 has a gradient of its own at the step"):
        zero.step()


def test_a_step_inside_of_gathered_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    zero = ZeroOptimizer(model, 1, 0, stage=3)
    with zero.gathered(), pytest.raises(ValueError, match="step was called inside gathered"):
        zero.step()


def dying_body(stage: int) -> None:
    model, zero = build(stage)
    train(model, zero, range(1, 2))
    if world()[1] == 1:
        model.blocks[1].register_forward_pre_hook(lambda *_: 1 / 0)
    train(model, zero, range(2, 3))


@pytest.mark.parametrize("stage", [2, 3])
def test_a_rank_that_fails_in_its_forward_ends_the_others_and_is_named(stage: int) -> None:
    with pytest.raises(RankError, match="rank 1 raised ZeroDivisionError"):
        run_world(dying_body, 2, stage, deadline_s=30)


def other_module_body() -> None:
    train(*build(3), range(1, 2), odd_ranks="first")


@pytest.mark.slow  # it waits for its deadline
def test_a_module_that_one_rank_alone_runs_is_a_named_error_in_stage_3() -> None:
    with pytest.raises(LaunchError, match="rank"):
        run_world(other_module_body, 2, deadline_s=8)
