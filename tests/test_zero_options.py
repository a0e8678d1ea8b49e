"""ZeroOptimizer's interface: defaults, what it refuses, groups added late, what it says of itself; its arithmetic is in test_zero.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from minigpt_dist import ZeroOptimizer
from minigpt_dist.launch import ledger, run_world
from minigpt_dist.parallel.precision import LossScaler


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))


def test_defaults_are_adamws_without_weight_decay() -> None:
    zero, adamw = ZeroOptimizer(model(), 1, 0), torch.optim.AdamW(model().parameters())
    assert zero.defaults == {**{name: adamw.defaults[name] for name in ("lr", "betas", "eps")}, "weight_decay": 0.0}
    assert (zero.stage, zero.max_norm, zero.exact, zero.clipping, zero.micro_batches) == (1, None, False, None, 0)


@pytest.mark.parametrize(
    ("options", "size"), [({"stage": 2}, 4 * 2**20), ({"stage": 3, "bucket_mb": 0.5}, 2**19), ({"stage": 1}, None)]
)
def test_buckets_are_of_so_many_mebibytes_above_stage_1(options: dict[str, Any], size: int | None) -> None:
    reducer = ZeroOptimizer(model(), 1, 0, **options)._reducer
    assert (None if reducer is None else reducer.bucket_bytes) == size


@pytest.mark.parametrize(
    "options", [{"lr": 0.0}, {"eps": 0.0}, {"betas": (0.0, 0.0)}, {"weight_decay": 0.0}, {"max_norm": 1e-9}]
)
def test_the_ends_of_the_ranges_are_allowed(options: dict[str, Any]) -> None:
    assert ZeroOptimizer(model(), 1, 0, **options).shards


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1e-9}, "lr is -1e-09, but should be >= 0"),
        ({"weight_decay": -1.0}, "weight_decay is -1.0, but should be >= 0"),
        ({"betas": (0.9, 1.0)}, "betas is .*, but should be two numbers"),
        ({"betas": (-0.1, 0.9)}, "betas is .*, but should be two numbers"),
    ],
)
def test_a_group_added_late_is_held_to_the_same_ranges(options: dict[str, Any], message: str) -> None:
    zero = ZeroOptimizer(model(), 1, 0)
    with pytest.raises(ValueError, match=message):
        zero.add_param_group({"params": [nn.Parameter(torch.ones(2))], **options})
    assert len(zero.shards) == 1


def test_a_group_added_late_has_a_shard_of_its_own_at_once() -> None:
    zero, late = ZeroOptimizer(model(), 1, 0), nn.Parameter(torch.ones(2))
    zero.add_param_group({"params": [late]})
    assert [shard.flat.params for shard in zero.shards] == [list(zero.param_groups[0]["params"]), [late]]


def test_each_dtype_has_a_shard_in_the_order_of_declaration() -> None:
    params = [nn.Parameter(torch.ones(n, dtype=torch.float64 if n % 2 else torch.float32)) for n in range(1, 5)]
    zero = ZeroOptimizer(params, 1, 0)
    assert [shard.flat.numels for shard in zero.shards] == [[1, 3], [2, 4]]


class Doubled(nn.Module):
    """A layer of float32, then one of float64."""

    def __init__(self) -> None:
        super().__init__()
        self.single, self.double_ = nn.Linear(2, 2), nn.Linear(2, 2).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.double_(self.single(x).double())
        return out


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_parameters_of_each_dtype_are_trained(stage: int) -> None:
    net = Doubled()
    zero = ZeroOptimizer(net, 1, 0, lr=0.1, stage=stage)
    net(torch.ones(1, 2)).sum().backward()
    zero.step()
    assert [shard.steps for shard in zero.shards] == [[1, 1], [1, 1]]
    assert [(shard.exp_avg != 0).all() for shard in zero.shards] == [True, True]


def made_body() -> list[str]:
    ledger.clear()
    ZeroOptimizer(model(), dist.get_world_size(), dist.get_rank())
    return [entry["op"] for entry in ledger.entries()]


def test_ranks_compare_their_parameters_once() -> None:
    assert run_world(made_body, 2) == [["all_gather"] * 2] * 2  # lengths, then digests


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_are_those_of_a_rank_between_backward_and_step(stage: int) -> None:
    """Whole ones in stage 1, a slice of the sum above; a frozen parameter's too, until they are forgotten."""
    net = model()
    net[0].bias.requires_grad_(False)
    zero = ZeroOptimizer(net, 1, 0, stage=stage)
    net(torch.ones(1, 4)).sum().backward()
    assert sum(g.numel() for g in zero.gradients()) == 20
    net[0].bias.grad = torch.ones(3)
    assert sum(g.numel() for g in zero.gradients()) == 23
    zero.zero_grad()
    assert net[0].bias.grad is None
    assert sum(float(g.abs().sum()) for g in zero.gradients()) == 0.0
    assert len(zero.gradients()) == (3 if stage == 1 else 0)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_micro_batches_are_counted_in_exact_mode_alone_and_forgotten_with_their_gradients(stage: int) -> None:
    counts = []
    for reduction in ("exact", "sum"):
        net = model()
        zero = ZeroOptimizer(net, 1, 0, stage=stage, reduction=reduction)
        for _ in range(2):
            net(torch.ones(1, 4)).sum().backward()
            zero.fold()
        zero.fold()  # which closes nothing
        counts.append(zero.micro_batches)
        zero.zero_grad()
        counts.append(zero.micro_batches)
    assert counts == [2, 0, 0, 0]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_assigned_by_hand_are_summed_in_exact_mode_too(stage: int) -> None:
    net = model()
    zero = ZeroOptimizer(net, 1, 0, lr=0.1, stage=stage, reduction="exact")
    net[0].bias.grad = torch.full((3,), 0.5)
    zero.fold()
    zero.step()
    assert (zero.shards[0].exp_avg != 0).sum() == 3
    assert zero.last_grad_sq == pytest.approx(3 * 0.5**2)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("reduction", ["sum", "exact"])
def test_only_sums_that_depend_on_order_are_kept_back_in_no_sync(stage: int, reduction: str) -> None:
    net = model()
    zero = ZeroOptimizer(net, 1, 0, stage=stage, reduction=reduction)
    with zero.no_sync():
        net(torch.ones(1, 4)).sum().backward()
    assert (net[0].bias.grad is None) == (reduction == "exact")


def test_a_model_beside_a_list_of_parameters_is_where_stage_3_finds_their_use() -> None:
    net = model()
    zero = ZeroOptimizer(list(net.parameters()), 1, 0, lr=0.1, stage=3, model=net)
    assert all(p.isnan().all() for p in net.parameters())
    with zero.gathered():
        before = [p.detach().clone() for p in net.parameters()]
    net(torch.ones(1, 4)).sum().backward()
    zero.step()
    with zero.gathered():
        assert not any(torch.equal(p, old) for p, old in zip(net.parameters(), before, strict=True))


def test_a_loss_of_a_closure_is_returned_and_its_gradients_are_used() -> None:
    net = model()
    zero, before = ZeroOptimizer(net, 1, 0, lr=0.1), net[0].bias.detach().clone()

    def closure() -> float:
        loss = net(torch.ones(1, 4)).sum()
        loss.backward()
        return float(loss.detach())

    expected = float(net(torch.ones(1, 4)).sum().detach())
    assert zero.step(closure) == expected
    assert zero.step() is None
    assert not torch.equal(net[0].bias, before)


@pytest.mark.parametrize(
    ("drop", "message"),
    [
        ("shards", "state has 0 shards and 1 groups, but should have 1 and 1"),
        ("groups", "state has 1 shards and 0 groups, but should have 1 and 1"),
    ],
)
def test_a_state_of_other_shards_or_groups_is_refused(drop: str, message: str) -> None:
    zero = ZeroOptimizer(model(), 1, 0)
    with pytest.raises(ValueError, match=message):
        zero.load_state_dict({**zero.state_dict(), drop: []})


def test_a_state_brings_its_groups_options_back() -> None:
    saved = ZeroOptimizer(model(), 1, 0, lr=0.5, betas=(0.1, 0.2), weight_decay=0.3).state_dict()
    saved["groups"][0]["betas"] = [0.1, 0.2]  # as JSON brings it back
    zero = ZeroOptimizer(model(), 1, 0)
    zero.load_state_dict(saved)
    own = zero.param_groups[0]
    assert (own["lr"], own["betas"], own["weight_decay"]) == (0.5, (0.1, 0.2), 0.3)
    assert [p.shape for p in own["params"]] == [p.shape for p in model().parameters()]
    assert "scaler" not in saved


@pytest.mark.parametrize("finite", [True, False])
def test_a_scaler_is_told_of_each_step_and_leaves_out_what_is_not_finite(finite: bool) -> None:
    net, scaler = model(), LossScaler(scale=4.0)
    zero = ZeroOptimizer(net, 1, 0, lr=0.1, scaler=scaler)
    before = net[0].bias.detach().clone()
    for _ in range(2):
        zero.zero_grad()
        net[0].bias.grad = torch.full((3,), 2.0 if finite else torch.inf)
        zero.step()
    assert torch.equal(net[0].bias, before) != finite
    assert zero.last_grad_sq == pytest.approx(3 * 0.5**2 if finite else float("nan"), nan_ok=True)
    assert zero.state_dict()["scaler"] == scaler.state_dict()


def test_the_norm_is_of_the_last_steps_mean_gradient_and_its_bound_is_kept() -> None:
    p = nn.Parameter(torch.zeros(2))
    zero = ZeroOptimizer([p], 1, 0, lr=0.1, max_norm=1.0)
    p.grad = torch.tensor([3.0, 4.0])
    zero.step()
    assert zero.clipping is not None
    assert (zero.last_grad_sq, zero.clipping.norm) == (25.0, 5.0)
    assert zero.shards[0].exp_avg.tolist() == pytest.approx([0.06, 0.08])
