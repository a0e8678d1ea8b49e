"""Clipping and its norm, weights of micro-batches, the moment of a checkpoint and buckets of gradients: their arithmetic, without ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from minigpt_dist.cadence import Cadence
from minigpt_dist.parallel.accumulation import token_weights
from minigpt_dist.parallel.buckets import FIRST_BUCKET_BYTES, Bucket, assign
from minigpt_dist.parallel.clipping import Clipping
from minigpt_dist.parallel.global_norm import GlobalNorm
from minigpt_dist.parallel.stages.stage1 import Stage1


@pytest.mark.parametrize(
    ("norm", "scale", "said"),
    [
        (4.0, 2.0 / (4.0 + 1e-6), "gradient norm 4, scaled by 0.5 to 2"),
        (1.5, 1.0, "gradient norm 1.5, left, as at most 2"),
        (2.0 - 1e-6, 1.0, "gradient norm 2, left, as at most 2"),
    ],
)
def test_a_gradient_is_scaled_down_to_its_bound_and_never_up(norm: float, scale: float, said: str) -> None:
    clipping = Clipping(norm, 2.0)
    assert (clipping.scale, str(clipping)) == (pytest.approx(scale, rel=1e-15), said)


class Axis:
    """Three ranks of one replica, where another one counts the parameters of three elements."""

    def sum(self, total: torch.Tensor) -> torch.Tensor:
        return total * 3

    def counts(self, p: nn.Parameter) -> bool:
        return p.numel() != 3


@pytest.mark.parametrize(("axis", "own", "total"), [(None, 105.0, 4.0), (Axis(), 85.0, 12.0)])
def test_a_norm_is_of_all_slices_without_what_another_rank_counts(axis: Any, own: float, total: float) -> None:
    norm = GlobalNorm(None, axis, torch.device("cpu"))
    shards = [Stage1([nn.Parameter(torch.zeros(n)) for n in sizes], 1, 0, False) for sizes in ((2, 3), (1,))]
    grads = [torch.tensor([4.0, 6.0, 2.0, 0.0, 4.0]), torch.tensor([33.0**0.5])]
    assert norm.own_sq(shards, grads) == pytest.approx(own, rel=1e-6)
    assert norm.sum(4.0) == total


def test_a_sum_of_norms_keeps_64_bits() -> None:
    assert GlobalNorm(None, None, torch.device("cpu")).sum(1 + 2.0**-40) == 1 + 2.0**-40


def test_a_micro_batch_weighs_by_its_share_of_the_tokens() -> None:
    assert token_weights([1, 3, 0]) == [0.25, 0.75, 0.0]


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        *((wrong, "but should be whole numbers of at least 0") for wrong in ([1, -1], [1.0], [True, 1])),
        *((none, "tokens are 0 on all ranks") for none in ([], [0, 0])),
    ],
)
def test_counts_that_are_none_are_refused(tokens: list[Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        token_weights(tokens)


def due(steps: int, minutes: float, seconds_a_step: float) -> list[int]:
    """Of twelve steps, those after which a checkpoint is due."""
    now = [100.0]
    cadence, found = Cadence(steps, minutes, clock=lambda: now[0]), []
    for step in range(1, 13):
        now[0] += seconds_a_step
        found += [step] if cadence.due(step) else []
    return found


@pytest.mark.parametrize(
    ("steps", "minutes", "seconds_a_step", "expected"),
    [
        (5, 0.0, 1e9, [5, 10]),
        (1, 0.0, 0.0, [*range(1, 13)]),
        (0, 1.0, 20.0, [3, 6, 9, 12]),  # just after a minute
        (0, 0.5, 7.0, [5, 10]),
        (4, 1.0, 20.0, [3, 4, 7, 8, 11, 12]),  # minutes count from the last checkpoint, whatever its reason
        (0, 0.0, 1e9, []),
    ],
)
def test_a_checkpoint_is_due_every_so_many_steps_or_minutes(
    steps: int, minutes: float, seconds_a_step: float, expected: list[int]
) -> None:
    assert due(steps, minutes, seconds_a_step) == expected


@pytest.mark.parametrize(
    ("options", "said"),
    [
        *(({"steps": wrong}, "steps is .*, but should be a whole number") for wrong in (-1, 1.0, True)),
        *(({"minutes": wrong}, "minutes is .*, but should be a finite number") for wrong in (-0.1, math.inf, math.nan)),
    ],
)
def test_a_cadence_of_no_number_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Cadence(**options)


def bucket() -> Bucket:
    return Bucket([nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(()))])


def test_a_bucket_holds_gradients_end_to_end_and_then_who_was_reached() -> None:
    made = bucket()
    for i, p in enumerate(made.params[:2]):
        p.grad = torch.full_like(p, i + 1.0)
        made.adopt(i)
        assert p.grad is made.views[i]  # at once: the next backward is to add to it
        assert made.views[i].eq(i + 1.0).all()
    made.prepare()
    assert made.flat.tolist() == [1.0] * 4 + [2.0] * 3 + [0.0] + [1.0, 1.0, 0.0]
    assert [p.grad is view for p, view in zip(made.params, made.views, strict=True)] == [True, True, False]
    assert [view.shape for view in made.views] == [p.shape for p in made.params]
    assert (made.reached, made.params[2].grad) == ([True, True, False], None)


def test_a_sum_over_ranks_becomes_the_mean_where_any_rank_was_reached() -> None:
    """The first here and elsewhere, the second elsewhere alone, the third nowhere: its own gradient comes back."""
    made = bucket()
    made.params[0].grad = torch.ones(2, 2)
    made.adopt(0)
    made.params[2].grad = torch.tensor(7.0)  # of an earlier backward, which was not exchanged
    made.prepare()
    assert made.reached == [True, False, False]
    made.flat.copy_(torch.tensor([4.0] * 4 + [2.0] * 3 + [21.0] + [2.0, 1.0, 0.0]))
    made.settle(2)
    assert [p.grad.tolist() for p in made.params if p.grad is not None] == [[[2.0, 2.0], [2.0, 2.0]], [1.0] * 3, 7.0]
    assert made.reached == [False] * 3
    made.params[2].grad = None
    made.prepare()
    made.settle(2)
    assert made.params[2].grad is None  # what was kept for the last exchange is not put back after this one


def test_a_gradient_thrown_away_after_it_was_reached_counts_as_none() -> None:
    made = bucket()
    made.params[1].grad = torch.ones(3)
    made.adopt(1)
    made.params[1].grad = None
    made.prepare()
    assert (made.flat.tolist(), made.reached) == ([0.0] * 11, [False] * 3)


def test_a_gradient_put_in_the_place_of_a_buckets_view_is_taken_in() -> None:
    made = bucket()
    made.params[1].grad = torch.ones(3)
    made.adopt(1)
    made.params[1].grad = torch.full((3,), 5.0)
    made.prepare()
    assert made.views[1].tolist() == [5.0] * 3
    assert made.params[1].grad is made.views[1]


@pytest.mark.parametrize(
    ("numels", "limit", "buckets"),
    [
        ([1, 1, 1, 1], 8, [[3, 2], [1, 0]]),
        ([1, 3, 1], 8, [[2], [1], [0]]),
        ([2, 2], 16, [[1, 0]]),
        ([FIRST_BUCKET_BYTES // 4, 1, 1], 2**30, [[2, 1], [0]]),  # the first is small
        ([1, FIRST_BUCKET_BYTES // 4, FIRST_BUCKET_BYTES // 4], 2**30, [[2], [1, 0]]),  # and full
    ],
)
def test_buckets_are_filled_from_the_last_parameter_on(numels: list[int], limit: int, buckets: list[list[int]]) -> None:
    assert assign([nn.Parameter(torch.zeros(n)) for n in numels], limit) == buckets


def test_each_dtype_has_buckets_of_its_own() -> None:
    params = [nn.Parameter(torch.zeros(1, dtype=torch.float64 if i % 2 else torch.float32)) for i in range(5)]
    assert assign(params, 2**20) == [[4, 2, 0], [3, 1]]


def test_the_first_bucket_is_of_one_mebibyte() -> None:
    assert FIRST_BUCKET_BYTES == 2**20
