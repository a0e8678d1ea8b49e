"""Mixed precision: a float32 master copy that is saved, a loss scale that all ranks agree on, and steps that are skipped together."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from minigpt_dist.checkpoint import load_sharded
from minigpt_dist.config import ModelConfig, TrainConfig
from minigpt_dist.launch import World
from minigpt_dist.parallel.collectives import subgroup
from minigpt_dist.parallel.global_norm import GlobalNorm
from minigpt_dist.parallel.model_axis import ModelAxis
from minigpt_dist.parallel.precision import LossScaler
from minigpt_dist.parallel.zero import ZeroOptimizer
from minigpt_dist.trace import Record, Trace
from minigpt_dist.worker import rank_body


@pytest.fixture(scope="module")
def two() -> Iterator[World]:
    with World(2, deadline_s=60) as live:
        yield live


def test_the_scale_falls_at_an_overflow_and_rises_after_a_clean_while() -> None:
    scaler, seen = LossScaler(8.0, interval=2), []
    for finite in (True, False, True, True, True, False, False, False, False):
        scaler.update(finite)
        seen.append(scaler.scale)
    assert seen == [8, 4, 4, 8, 8, 4, 2, 1, 1]
    assert scaler.skipped == 5


def test_a_scale_that_would_overflow_itself_stays() -> None:
    scaler = LossScaler(2.0**1023, interval=1)
    scaler.update(True)
    assert scaler.scale == 2.0**1023


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"scale": 0.5}, "scale is 0.5, but should be finite and at least 1.0"),
        ({"scale": float("inf")}, "scale is inf, but should be finite"),
        ({"growth": 0.5}, "growth is 0.5, but should be finite and at least 1"),
        ({"backoff": 1.0}, "backoff is 1.0, but should be above 0 and below 1"),
        ({"interval": 0}, "interval is 0, but should be a whole number of at least 1"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        LossScaler(**options)


def half_gradient(scaler: LossScaler) -> float:
    """The gradient 1e-8 of a float16 weight, which is below its smallest number."""
    p = nn.Parameter(torch.ones(1, dtype=torch.float16))
    scaler.scaled(p.float().sum() * 1e-8).backward()
    assert p.grad is not None
    grads = [p.grad.float()]
    assert scaler.unscale_(grads)
    return float(grads[0])


def test_a_gradient_that_float16_cannot_hold_survives_under_the_scale() -> None:
    assert half_gradient(LossScaler(1.0)) == 0.0
    assert half_gradient(LossScaler(2.0**16)) == pytest.approx(1e-8, rel=1e-3)


def steps_of(scaler: LossScaler | None, max_norm: float | None = 0.05, kind: type = ZeroOptimizer) -> list[Tensor]:
    """Weights after three float32 steps with gradients of very unlike sizes, clipped."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = kind(model, 1, 0, 1e-2, max_norm=max_norm, scaler=scaler)
    for seed in range(3):
        optimizer.zero_grad()
        loss = model(torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))).square().mean() * 10.0**seed
        (loss if scaler is None else scaler.scaled(loss)).backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


class ClipsFirst(ZeroOptimizer):
    """Clips gradients that still have the scale in them."""

    def _agreed_finite(self, grads: list[Tensor]) -> bool:
        self._clip(grads)
        return super()._agreed_finite(grads)


@pytest.mark.parametrize("max_norm", [None, 0.05])
def test_a_scale_changes_no_bit_of_a_float32_run_also_where_clipping_bites(max_norm: float | None) -> None:
    plain, scaled = steps_of(None, max_norm), steps_of(LossScaler(2.0**10), max_norm)
    assert all(torch.equal(a, b) for a, b in zip(plain, scaled, strict=True))


def test_clipping_before_the_scale_is_taken_out_is_seen() -> None:
    wrong = steps_of(LossScaler(2.0**10), 0.05, ClipsFirst)
    assert not all(torch.equal(a, b) for a, b in zip(steps_of(None), wrong, strict=True))


def overflow_body(axis: str, dtype: str = "float16", wrong: bool = False) -> dict[str, Any]:
    """One good step, one in which rank 1 alone has an inf, one good one; on a data axis or a model axis of two."""
    rank, alone = dist.get_rank(), subgroup([dist.get_rank()])
    model = nn.Linear(3, 2).to(kind := getattr(torch, dtype))
    nn.init.constant_(model.weight, 0.5)
    place = (2, rank) if axis == "data" else (1, 0)
    over = {} if axis == "data" else {"group": alone, "model_axis": ModelAxis(None)}
    scaler = LossScaler(2.0**8)
    optimizer = ZeroOptimizer(model, *place, 1e-2, scaler=scaler, **over)
    own = mock.patch.object(GlobalNorm, "sum", lambda self, value: value)
    before = {}
    with own if wrong else contextlib.nullcontext():
        for step in range(3):
            optimizer.zero_grad()
            scaler.scaled(model(torch.ones(1, 3, dtype=kind)).float().sum()).backward()
            if step == 1 and rank == 1:
                model.weight.grad.view(-1)[-1] = torch.inf
            optimizer.step()
            state = optimizer.state_dict()["shards"][0]
            before[str(step)] = [
                model.weight.detach().clone(),
                *(state[n] for n in ("master", "exp_avg", "exp_avg_sq")),
            ]
    return {"states": before, "steps": state["steps"], "scaler": scaler.state_dict()}


@pytest.mark.parametrize("dtype", ["float16", "float32"])  # float32 parameters' own memory takes part in the exchange
@pytest.mark.parametrize("axis", ["data", "model"])
def test_one_ranks_overflow_skips_the_step_on_all(two: World, axis: str, dtype: str) -> None:
    for rank in two.run(overflow_body, axis, dtype):
        assert all(torch.equal(a, b) for a, b in zip(rank["states"]["0"], rank["states"]["1"], strict=True))
        assert not torch.equal(rank["states"]["1"][0], rank["states"]["2"][0])
        assert max(rank["steps"]) == 2
        assert rank["scaler"] == {"scale": 2.0**7, "clean": 1, "skipped": 1}


@pytest.mark.parametrize("axis", ["data", "model"])
def test_ranks_that_decide_alone_are_seen_to_differ(two: World, axis: str) -> None:
    first, second = two.run(overflow_body, axis, "float16", True)
    assert first["scaler"] != second["scaler"]


CONFIG = TrainConfig(
    world_size=2, steps=8, checkpoint_step=4, dtype="float16", model=ModelConfig(vocab=16, embed_dim=16, seq_len=8)
)


def run_of(two: World, config: TrainConfig, folder: str, source: str | None = None) -> list[list[Record]]:
    results = two.run(rank_body, config.to_dict(), folder, source is not None, ["digests"], "cpu", source)
    return [[Record(**record) for record in result["records"]] for result in results]


@pytest.fixture
def folders() -> Iterator[tuple[str, str]]:
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        yield first, second


@pytest.mark.parametrize("tp", [1, 2])
def test_skipped_steps_are_counted_in_the_trace_and_change_nothing(two: World, tp: int, folders: Any) -> None:
    records = run_of(two, replace(CONFIG, tp=tp, loss_scale=2.0**22), folders[0])
    trace = Trace({}, [record for rank in records for record in rank])
    skips = trace.skips()
    assert 1 <= len(skips) < CONFIG.steps
    assert skips == list(range(1, 1 + len(skips)))
    assert [r.loss_scale for r in records[1][1:]] == [2.0**22 / 2 ** min(s, len(skips)) for s in range(CONFIG.steps)]
    assert all(rank[s].params == records[0][0].params for rank in records for s in skips)
    assert records[0][-1].params == records[1][-1].params != records[0][0].params


def test_float16_learns_as_float32_does(two: World, folders: Any) -> None:
    half = run_of(two, CONFIG, folders[0])
    full = run_of(two, replace(CONFIG, dtype="float32"), folders[1])
    for a, b in zip(half[0][1:], full[0][1:], strict=True):
        assert a.loss == pytest.approx(b.loss, rel=2e-3)  # 2^-11 a rounding
        assert a.grad_norm == pytest.approx(b.grad_norm, rel=1e-2)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_resumed_run_has_the_master_copy_that_was_saved(two: World, dtype: str, folders: Any) -> None:
    config = replace(CONFIG, dtype=dtype)
    whole = run_of(two, config, folders[0])
    state = load_sharded(folders[0], 2)[0]
    resumed = run_of(two, config, folders[1], folders[0])
    assert [r.optimizer for r in resumed[0]] == [r.optimizer for r in whole[0][4:]]
    weights = torch.cat([t.flatten() for t in state["model"].values()]).float()
    master = state["optimizer"]["shards"][0]["master"]
    assert not torch.equal(master, weights[: len(master)])  # 16 bits could not give it back


def losing(how: str) -> Callable[[dict[str, Any], nn.Module], dict[str, Any]]:
    def derived(state: dict[str, Any], model: nn.Module) -> dict[str, Any]:
        weights = torch.cat([p.detach().flatten() for p in model.parameters()]).float()
        return {**state, "shards": [{**state["shards"][0], "master": weights}]}

    return {"nothing": lambda state, _: state, "the master copy": derived}[how]


@pytest.mark.parametrize("lost", ["nothing", "the master copy"])
def test_a_master_copy_made_anew_from_16_bits_is_seen(lost: str) -> None:
    torch.manual_seed(0)
    model, again = nn.Linear(6, 6).bfloat16(), nn.Linear(6, 6).bfloat16()
    optimizer, other = (ZeroOptimizer(m, 1, 0, 1e-3) for m in (model, again))
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.ones(1, 6).bfloat16()).float().square().sum().backward()
        optimizer.step()
    again.load_state_dict(model.state_dict())
    other.load_state_dict(losing(lost)(optimizer.state_dict(), model))
    assert torch.equal(optimizer.shards[0].master, other.shards[0].master) == (lost == "nothing")


def test_a_state_without_its_scaler_is_refused() -> None:
    model = nn.Linear(2, 2).half()
    with_one, without = (ZeroOptimizer(model, 1, 0, scaler=scaler) for scaler in (LossScaler(), None))
    with pytest.raises(ValueError, match="state has no loss scaler, but should have one"):
        with_one.load_state_dict(without.state_dict())
    with pytest.raises(ValueError, match="state has one loss scaler, but should have none"):
        without.load_state_dict(with_one.state_dict())
    with pytest.raises(ValueError, match="the loss scaler's state has"):
        LossScaler().load_state_dict({"scale": 1.0})


def test_an_overflow_is_the_scalers_and_no_rollback_of_the_guard(two: World, folders: Any) -> None:
    records = run_of(two, replace(CONFIG, loss_scale=2.0**22, guard="replay"), folders[0])
    assert [r.step for r in records[0]] == list(range(CONFIG.steps + 1))
