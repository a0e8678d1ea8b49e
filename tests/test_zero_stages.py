"""ZeRO stages 2 and 3: the bits of stage 1, whatever takes part; checkpoints that move between stages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from zero_stage_cases import SIZES, Odd, backward, build, train

from minigpt_dist import ZeroOptimizer
from minigpt_dist.launch import World, run_world
from minigpt_dist.runner import capture, restore_state


@pytest.fixture(scope="module", params=SIZES)
def ranks(request: pytest.FixtureRequest) -> Iterator[World]:
    with World(request.param, deadline_s=60) as live:
        yield live


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "micro-batches": {"micros": 3},
    "exact": {"micros": 3, "reduction": "exact"},
    "clipped": {"max_norm": 0.1, "weight_decay": 0.1},
    "bfloat16": {"dtype": torch.bfloat16, "micros": 2},
    "float64": {"dtype": torch.float64},
}


def stages_body(case: str) -> list[list[Any]]:
    options = dict(CASES[case])
    micros = options.pop("micros", 1)
    return [train(*build(stage, **options), range(1, 4), micros) for stage in (1, 2, 3)]


@pytest.mark.parametrize("case", ["micro-batches", "exact"])
def test_stages_2_and_3_have_the_bits_of_stage_1_in_one_process(case: str) -> None:
    first, second, third = stages_body(case)
    assert second == first
    assert third == first


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow if case == "float64" else ()) for case in CASES]
)
def test_stages_2_and_3_have_the_bits_of_stage_1_at_every_step(ranks: World, case: str) -> None:
    for first, second, third in ranks.run(stages_body, case):
        assert second == first
        assert third == first


def clipped_body(max_norm: float) -> list[Any]:
    """Per stage: what one step's clipping reports, and the parameters after it."""
    seen = []
    for stage in (1, 2, 3):
        model, zero = build(stage, torch.float64, max_norm=max_norm)
        train(model, zero, range(1, 2))
        with zero.gathered():
            parameters = [p.detach().clone() for p in model.parameters()]
        assert zero.clipping is not None
        seen.append([zero.clipping.norm, zero.clipping.scale, str(zero.clipping), parameters])
    return seen


def clipped_by_torch_body(world_size: int, max_norm: float) -> list[Any]:
    """The same on one process, by clip_grad_norm_ and AdamW: the norm before, and the parameters."""
    model = Odd().double()
    for rank in range(world_size):
        draw = torch.Generator().manual_seed(100 + rank * 10)
        ids = torch.randint(0, 12, (3, 5), generator=draw)
        logits = model(ids, True).flatten(0, 1).float()
        (nn.functional.cross_entropy(logits, ids.flatten()) / world_size).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0).step()
    return [float(norm), list(model.parameters())]


@pytest.mark.parametrize("max_norm", [0.1, pytest.param(100.0, marks=pytest.mark.slow)])
def test_clipping_over_shards_is_that_of_one_process_and_reports_it(ranks: World, max_norm: float) -> None:
    """Within float64's rounding; Adam magnifies it by at most lr/eps (1e-17 in a gradient, 1e-11 in a parameter)."""
    ((norm, parameters),) = run_world(clipped_by_torch_body, 1, ranks.world_size, max_norm)
    for seen in ranks.run(clipped_body, max_norm):
        for found, scale, said, mine in seen:
            assert found == pytest.approx(norm, rel=1e-7)  # logits are rounded to float32 on both sides
            assert scale == min(max_norm / (found + 1e-6), 1.0)
            assert said.startswith(f"gradient norm {found:.6g}, {'scaled' if scale < 1 else 'left'}")
            assert all((a - b).abs().max() < 1e-8 for a, b in zip(mine, parameters, strict=True))


def one_rank_body() -> list[list[Any]]:
    return [train(*build(stage), range(1, 3), odd_ranks="first") for stage in (1, 2)]


def test_a_parameter_used_on_one_rank_alone_is_averaged_over_all_in_stage_2(ranks: World) -> None:
    assert all(second == first for first, second in ranks.run(one_rank_body))


def moves_body(before: int, after: int) -> list[Any]:
    """Two steps at one stage, a checkpoint, two more at another, beside four at the first."""
    model, zero = build(before)
    train(model, zero, range(1, 3))
    with zero.gathered():
        state = capture(2, model, zero)
    unbroken = train(model, zero, range(3, 5))
    model, zero = build(after)
    with torch.no_grad(), zero.gathered():
        for p in model.parameters():
            p.add_(1.0)
        restore_state(state, model, zero)
    return [unbroken, train(model, zero, range(3, 5))]


@pytest.mark.parametrize(
    ("before", "after"), [(1, 3), (3, 1), *(pytest.param(*moved, marks=pytest.mark.slow) for moved in ((2, 3), (3, 2)))]
)
def test_a_checkpoint_moves_between_stages_with_the_bytes_of_the_unbroken_run(
    ranks: World, before: int, after: int
) -> None:
    assert all(moved == unbroken for unbroken, moved in ranks.run(moves_body, before, after))


def written_body(stage: int) -> list[str]:
    """Weights written into the model between steps, then one step."""
    model, zero = build(stage)
    train(model, zero, range(1, 2))
    with torch.no_grad(), zero.gathered():
        for p in model.parameters():
            p.mul_(0.5)
    return [str(entry) for entry in train(model, zero, range(2, 3))]


def test_weights_written_while_gathered_are_trained_on(ranks: World) -> None:
    (one, *_), (two, *_), (three, *_) = (ranks.run(written_body, stage) for stage in (1, 2, 3))
    assert one == two == three


def left_whole_body() -> list[list[Any]]:
    """A forward without a backward before each step: its last unit waits for a backward that never comes."""
    seen = []
    for stage in (1, 3):
        model, zero = build(stage)
        train(model, zero, range(1, 2))
        zero.zero_grad()
        backward(model, 2, 0, True)
        model(torch.zeros(1, 2, dtype=torch.int64), True)
        zero.step()
        seen.append(train(model, zero, range(3, 4)))
    return seen


def test_a_unit_left_whole_by_a_forward_alone_is_not_stale_after_the_step(ranks: World) -> None:
    assert all(third == first for first, third in ranks.run(left_whole_body))


@pytest.mark.parametrize("stage", [2, 3])
def test_a_step_uses_its_gradients_up(stage: int) -> None:
    def trained(forget: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 2))
        zero = ZeroOptimizer(model, 1, 0, lr=0.1, stage=stage, reduction="exact")
        model(torch.ones(1, 2)).square().sum().backward()
        zero.step()
        if forget:
            zero.zero_grad()
        for p in model.parameters():  # by hand: the step itself must exchange them
            p.grad = torch.full_like(p, 0.5)
        zero.step()
        return [shard.exp_avg for shard in zero.shards]

    assert all(torch.equal(a, b) for a, b in zip(trained(forget=True), trained(forget=False), strict=True))
