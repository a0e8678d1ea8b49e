"""ZeroOptimizer on one process, where it has to be torch.optim.AdamW, and what it refuses; the judge's scenarios cover the ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from minigpt_dist import MiniGPT, ZeroOptimizer
from minigpt_dist.launch import RankError, run_world
from minigpt_dist.memory import baseline, census


def pair(**options: Any) -> tuple[nn.Sequential, nn.Sequential, ZeroOptimizer, torch.optim.AdamW]:
    """Two equal models, ours and torch's optimizer over them."""
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    theirs = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    theirs.load_state_dict(ours.state_dict())
    options = {"lr": 0.05, "weight_decay": 0.1, **options}
    return ours, theirs, ZeroOptimizer(ours, 1, 0, **options), torch.optim.AdamW(theirs.parameters(), **options)


def backward(model: nn.Module, seed: int) -> None:
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))
    model(x).square().sum().backward()


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def both(step: Callable[[nn.Module, torch.optim.Optimizer], None], steps: int = 4, **options: Any) -> bool:
    """Run the same steps on both sides; are all parameters equal bit for bit?"""
    ours, theirs, zero, adamw = pair(**options)
    for model, optimizer in ((ours, zero), (theirs, adamw)):
        for _ in range(steps):
            step(model, optimizer)
    return same(ours, theirs)


def test_plain_steps_are_bit_equal_to_adamw() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        backward(model, 1)
        optimizer.step()

    assert both(step)


def test_a_scheduler_drives_the_learning_rate() -> None:
    ours, theirs, zero, adamw = pair()
    for model, optimizer in ((ours, zero), (theirs, adamw)):
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=3)
        for seed in range(5):
            optimizer.zero_grad()
            backward(model, seed)
            optimizer.step()
            scheduler.step()
    assert same(ours, theirs)


def test_a_gradient_assigned_by_hand_counts_as_one() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        for p in model.parameters():
            p.grad = torch.full_like(p, 0.25)
        optimizer.step()

    assert both(step)


def test_a_gradient_made_with_create_graph_counts_as_one() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 4)).square().sum().backward(create_graph=True)
        optimizer.step()

    with pytest.warns(UserWarning, match="create_graph"):
        assert both(step)


def test_gradients_add_up_without_zero_grad_also_of_a_parameter_that_was_not_used_before() -> None:
    ours, theirs, zero, adamw = pair()
    for model, optimizer in ((ours, zero), (theirs, adamw)):
        for _ in range(2):
            model[0](torch.ones(1, 4)).sum().backward()
            optimizer.step()
        backward(model, 1)
        optimizer.step()
    assert same(ours, theirs)


def test_weights_loaded_into_the_model_between_steps_are_trained_on() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        backward(model, 2)
        optimizer.step()
        model.load_state_dict({name: t * 0.5 for name, t in model.state_dict().items()})

    assert both(step)


def test_a_parameter_unfrozen_later_is_trained_from_then_on() -> None:
    ours, theirs, _, _ = pair()
    for model, build in (
        (ours, lambda m: ZeroOptimizer(m, 1, 0, lr=0.05)),
        (theirs, lambda m: torch.optim.AdamW(m.parameters(), lr=0.05, weight_decay=0)),
    ):
        next(iter(model.parameters())).requires_grad_(False)
        optimizer = build(model)
        for seed in range(4):
            if seed == 2:
                next(iter(model.parameters())).requires_grad_(True)
            optimizer.zero_grad()
            backward(model, seed)
            optimizer.step()
    assert same(ours, theirs)


def test_parameters_of_two_dtypes_keep_their_own() -> None:
    model = nn.ParameterList([nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2, dtype=torch.float64))])
    zero = ZeroOptimizer(model, 1, 0, lr=0.1)
    sum(p.sum() for p in model).backward()
    zero.step()
    assert [p.dtype for p in model] == [torch.float32, torch.float64]
    assert all(float(p[0].detach()) == pytest.approx(0.9) for p in model)


def test_bfloat16_parameters_move_by_less_than_their_spacing() -> None:
    p = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    zero = ZeroOptimizer([p], 1, 0, lr=1e-3)
    for _ in range(8):
        zero.zero_grad()
        p.sum().backward()
        zero.step()
    assert float(p[0].detach()) < 1.0


def test_parameters_and_gradients_are_views_into_one_buffer_each() -> None:
    ours, _, zero, _ = pair()
    backward(ours, 0)
    assert {p.untyped_storage().data_ptr() for p in ours.parameters()} == {
        zero.shards[0].flat.data.untyped_storage().data_ptr()
    }
    assert {p.grad.untyped_storage().data_ptr() for p in ours.parameters() if p.grad is not None} == {
        zero.shards[0].flat.grad.untyped_storage().data_ptr()
    }


def test_optimizer_holds_twelve_bytes_a_parameter() -> None:
    model = MiniGPT()
    known = baseline()
    zero = ZeroOptimizer(model, 1, 0)
    assert census(model, known)["optimizer"] == 12 * 29_824
    assert zero.shards[0].master.numel() == 29_824


def hidden_body() -> list[int]:
    model = nn.Linear(4, 4)
    known, found = baseline(), []
    for home in (torch, torch.nn, model):  # modules loaded before the fork are known to no collector
        vars(home)["kept"] = torch.ones(100)
        found.append(census(model, known)["optimizer"])
    return found


def test_a_tensor_counts_wherever_a_name_holds_it() -> None:
    assert run_world(hidden_body, 1) == [[400, 800, 1200]]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"lr": -1.0}, "lr is -1.0, but should be >= 0"),
        ({"lr": float("nan")}, "lr is nan, but should be >= 0"),
        ({"betas": (1.0, 0.9)}, r"betas is \(1.0, 0.9\), but should be two numbers"),
        ({"eps": -1e-8}, "eps is -1e-08"),
        ({"max_norm": 0.0}, "max_norm is 0.0, but should be above 0"),
        ({"reduction": "mean"}, "reduction is 'mean', but should be 'sum' or 'exact'"),
        ({"world_size": 2}, r"\(world_size, rank\) is \(2, 0\), but should be \(1, 0\)"),
    ],
)
def test_wrong_options_are_refused_in_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ZeroOptimizer(nn.Linear(2, 2), **{"world_size": 1, "rank": 0, **options})


def test_no_parameters_at_all_are_refused() -> None:
    with pytest.raises(ValueError, match="empty parameter list"):
        ZeroOptimizer([], 1, 0)


def test_a_model_cast_after_its_optimizer_was_built_is_refused() -> None:
    ours, _, zero, _ = pair()
    ours.double()
    with pytest.raises(ValueError, match="no longer lives in the optimizer's flat buffer"):
        zero.step()


def test_a_parameter_whose_memory_was_replaced_is_refused() -> None:
    ours, _, zero, _ = pair()
    first = next(ours.parameters())
    first.data = first.data.clone()
    with pytest.raises(ValueError, match=r"parameter 0 .* no longer lives in the optimizer's flat buffer"):
        zero.step()


def test_a_state_of_another_layout_is_refused_and_changes_nothing() -> None:
    ours, _, zero, _ = pair()
    before = [p.clone() for p in ours.parameters()]
    state = zero.state_dict()
    state["shards"][0]["total"] = 99
    with pytest.raises(ValueError, match="total of the optimizer's shard is 99, but should be 23"):
        zero.load_state_dict(state)
    assert all(torch.equal(p, q) for p, q in zip(ours.parameters(), before, strict=True))


def unequal_models_body() -> None:
    ZeroOptimizer(nn.Linear(2 + dist.get_rank(), 2), dist.get_world_size(), dist.get_rank())


def test_models_that_differ_between_ranks_are_refused_on_every_rank() -> None:
    with pytest.raises(RankError, match=r"a parameter of rank 1 is \(2, 3\) torch.float32, but should be \(2, 2\)"):
        run_world(unequal_models_body, 2)
