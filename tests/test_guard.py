"""The guard, the cadence and the weights of accumulation: all ranks decide alike."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from minigpt_dist.cadence import Cadence
from minigpt_dist.guard import Guard, Incident, TrainingStopped
from minigpt_dist.launch import World
from minigpt_dist.parallel.accumulation import token_weights
from minigpt_dist.parallel.zero import ZeroOptimizer


@pytest.fixture(scope="module", params=[1, 2, 4])
def ranks(request: pytest.FixtureRequest) -> Iterator[World]:
    with World(request.param, deadline_s=60) as live:
        yield live


def guard_body(losses: list[list[float]], bad_gradient_at: tuple[int, int] | None) -> list[Any]:
    """losses[step][rank]; a NaN in one gradient of one rank at (step, rank)."""
    rank, guard = dist.get_rank(), Guard(limit=10)
    seen = []
    for step, row in enumerate(losses):
        gradient = torch.ones(5)
        if (step, rank) == bad_gradient_at:
            gradient[3] = math.nan
        guard.ask(row[rank % len(row)], [gradient])
        incident = guard.answer(step)
        seen.append(None if incident is None else [incident.what, incident.ranks])
    return seen


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_on_one_rank_is_bad_for_all(ranks: World, value: float) -> None:
    losses = [[1.0], [value, *[1.0] * (ranks.world_size - 1)], [1.0]]
    assert ranks.run(guard_body, losses, None) == [[None, ["not finite", 1], None]] * ranks.world_size


def test_a_nan_in_one_gradient_of_one_rank_is_bad_for_all(ranks: World) -> None:
    at = (1, ranks.world_size - 1)
    assert ranks.run(guard_body, [[1.0]] * 3, at) == [[None, ["not finite", 1], None]] * ranks.world_size


def test_a_mean_loss_above_twice_the_last_good_one_is_a_spike(ranks: World) -> None:
    losses = [[1.0], [2.0], [4.1], [3.9], [7.9]]
    assert ranks.run(guard_body, losses, None) == [[None, None, ["spike", 0], None, ["spike", 0]]] * ranks.world_size


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_gradients_that_are_finite_are_good_though_their_sum_is_not(dtype: torch.dtype) -> None:
    guard, large = Guard(), torch.full((4,), torch.finfo(dtype).max, dtype=dtype)
    for step, last in enumerate([1.0, math.inf, -math.inf, math.nan]):
        guard.ask(1.0, [large, torch.tensor([2.0, last])])
        assert (guard.answer(step) is None) == (step == 0)


def test_the_guard_stops_with_a_report_when_it_may_not_roll_back_again() -> None:
    guard = Guard(limit=1)
    guard.ask(math.nan, [])
    assert isinstance(guard.answer(3), Incident)
    guard.ask(math.nan, [])
    with pytest.raises(TrainingStopped, match="step 4: loss or gradient not finite on 1 rank"):
        guard.answer(4)


def cadence_body(steps: int, minutes: float, seconds_a_step: list[float]) -> list[int]:
    """The steps at which a checkpoint is due; each rank's clock runs at its own speed."""
    now = 0.0

    def clock() -> float:
        return now

    cadence = Cadence(steps, minutes, clock=clock)
    found = []
    for step in range(1, 13):
        now += seconds_a_step[dist.get_rank() % len(seconds_a_step)]
        if cadence.due(step):
            found.append(step)
    return found


@pytest.mark.parametrize(
    ("steps", "minutes", "expected"),
    [(5, 0.0, [5, 10]), (0, 1.0, [3, 6, 9, 12]), (5, 1.0, [3, 5, 8, 10]), (0, 0.0, [])],
)
def test_all_ranks_write_at_the_step_that_rank_0s_clock_chooses(
    ranks: World, steps: int, minutes: float, expected: list[int]
) -> None:
    assert ranks.run(cadence_body, steps, minutes, [20.0, 1.0, 500.0]) == [expected] * ranks.world_size


def batch(rank: int, micro: int) -> Tensor:
    """A micro-batch of its own length."""
    length = 1 + (3 * rank + 2 * micro) % 5
    return torch.randn(length, 3, generator=torch.Generator().manual_seed(10 * rank + micro), dtype=torch.float64)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = model(x).square().mean()
    return out


def accumulated_body(micros: int, max_norm: float | None) -> Tensor:
    torch.manual_seed(0)
    rank, N = dist.get_rank(), dist.get_world_size()
    model = nn.Linear(3, 2).double()
    optimizer = ZeroOptimizer(model, N, rank, lr=0.1, betas=(0.0, 0.0), eps=0.5, max_norm=max_norm)
    batches = [batch(rank, m) for m in range(micros)]
    optimizer.zero_grad()
    for x, weight in zip(batches, token_weights([len(x) for x in batches]), strict=True):
        (loss_of(model, x) * weight).backward()
    optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def large_batch(world_size: int, micros: int, max_norm: float | None) -> Tensor:
    """One process, one batch of everything, torch's own clipping and AdamW."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, betas=(0.0, 0.0), eps=0.5, weight_decay=0.0)
    loss_of(model, torch.cat([batch(r, m) for r in range(world_size) for m in range(micros)])).backward()
    if max_norm is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("max_norm", [None, 0.01])
@pytest.mark.parametrize("micros", [1, 4])
def test_micro_batches_of_uneven_length_weigh_as_one_large_batch(
    ranks: World, micros: int, max_norm: float | None
) -> None:
    wanted = large_batch(ranks.world_size, micros, max_norm)
    assert all(float((seen - wanted).abs().max()) < 1e-12 for seen in ranks.run(accumulated_body, micros, max_norm))


def refused_weights_body() -> str:
    try:
        token_weights([-1] if dist.get_rank() == 0 else [4])
    except ValueError as error:
        return str(error)
    return "accepted"


def test_a_wrong_count_on_one_rank_is_refused_on_all(ranks: World) -> None:
    assert all("but should be whole numbers" in said for said in ranks.run(refused_weights_body))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: Guard(spike=1.0), "spike is 1.0, but should be a finite number above 1"),
        (lambda: Guard(limit=-1), "limit is -1, but should be a whole number"),
        (lambda: Guard(policy="hope"), "policy is 'hope', but should be one of replay, skip"),
        (lambda: Guard().answer(1), "answer was called, but should be called after ask"),
        (lambda: Cadence(steps=-1), "steps is -1, but should be"),
        (lambda: Cadence(minutes=math.nan), "minutes is nan, but should be"),
    ],
)
def test_a_wrong_setting_is_refused(call: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        call()
