"""ZeRO stages 2 and 3: which units are whole when, as storages show, and which messages a step sends."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from zero_stage_cases import SIZES, backward, build, train

from minigpt_dist import MiniGPT, ZeroOptimizer
from minigpt_dist.launch import World, ledger
from minigpt_dist.memory import held, live_bytes
from minigpt_dist.parallel.collectives import world
from minigpt_dist.parallel.stages.units import unit_modules


@pytest.fixture(scope="module", params=SIZES)
def ranks(request: pytest.FixtureRequest) -> Iterator[World]:
    with World(request.param, deadline_s=60) as live:
        yield live


def units_in_flight_body() -> dict[str, Any]:
    """Bytes of parameters alive when each unit of MiniGPT begins its forward, and at the end; and of each unit itself."""
    torch.manual_seed(0)
    model = MiniGPT(num_layers=3)
    units = unit_modules(model)
    sizes = [sum(p.nbytes for m in unit for p in m.parameters()) for unit in units]
    zero = ZeroOptimizer(model, world()[0], world()[1], stage=3)
    inputs = [torch.zeros(1, 4, dtype=torch.int64)]
    before, alive = live_bytes(), list[int]()
    for unit in units:
        unit[0].register_forward_pre_hook(lambda _, args: alive.append(live_bytes() - before - held(args)))
    with torch.no_grad():
        model(*inputs)
    return {"sizes": sizes, "alive": alive, "after": live_bytes() - before, "stage": zero.stage}


def test_parameters_alive_in_forward_are_the_unit_that_runs_and_the_next(ranks: World) -> None:
    for seen in ranks.run(units_in_flight_body):
        following = [*seen["sizes"][1:], 0]
        # The first unit's input is counted before too.
        assert seen["alive"][0] + 4 * 8 == seen["sizes"][0] + following[0]
        assert seen["alive"][1:] == [a + b for a, b in zip(seen["sizes"][1:], following[1:], strict=True)]
        assert seen["after"] == 0


def peak_body(stage: int) -> dict[str, int]:
    """The most bytes alive in a step beyond those before it, seen where blocks begin and gradients come; and after backward."""
    torch.manual_seed(0)
    model, N = MiniGPT(num_layers=8), world()[0]
    zero = ZeroOptimizer(model, N, world()[1], stage=stage, bucket_mb=0.02)
    ids, seen = torch.zeros(2, 8, dtype=torch.int64), [0]
    zero.zero_grad()
    before = live_bytes()
    for block in (model.blocks[1], model.blocks[4]):
        block.register_forward_pre_hook(lambda *_: seen.append(live_bytes() - before))
        for p in (block.mlp[2].bias, block.mlp[0].weight, block.ln1.weight):
            p.register_post_accumulate_grad_hook(lambda _: seen.append(live_bytes() - before))
    loss = model(ids).square().mean()
    loss.backward()
    P, unit = sum(p.numel() for p in model.parameters()), sum(p.nbytes for p in model.blocks[0].parameters())
    del loss
    return {
        "peak": max(seen),
        "after": live_bytes() - before,
        "shard": 4 * -(-P // N),
        "unit": unit,
        "whole": 4 * P,
        "N": N,
    }


@pytest.mark.parametrize(("stage", "units"), [pytest.param(2, 0, marks=pytest.mark.slow), (3, 2)])
def test_a_step_holds_its_slice_of_gradients_the_units_in_flight_and_the_buckets_in_flight(
    ranks: World, stage: int, units: int
) -> None:
    """A bucket is at most 20 KiB: one is filled, one sent, and received from each rank. What comes back is a slice of the sum."""
    for seen in ranks.run(peak_body, stage):
        in_flight = (2 + seen["N"]) * int(0.02 * 2**20)
        assert seen["N"] == 1 or seen["shard"] + in_flight < seen["whole"]
        assert seen["after"] == seen["shard"]
        assert seen["shard"] <= seen["peak"] <= seen["shard"] + units * seen["unit"] + in_flight


def used_while_freed_body() -> list[bool]:
    model = MiniGPT()
    zero = ZeroOptimizer(model, world()[0], world()[1], stage=3)
    with zero.gathered():
        whole = not any(p.isnan().any() for p in model.parameters())
    return [whole] + [bool(p.isnan().all()) for p in model.parameters()]


def test_a_freed_parameter_reads_as_not_a_number_of_its_own_shape(ranks: World) -> None:
    assert all(all(seen) for seen in ranks.run(used_while_freed_body))


def ahead_body() -> list[int]:
    """Exchanges started in backward by the time that each block's begins, the last block first."""
    model = MiniGPT(num_layers=3)
    ZeroOptimizer(model, world()[0], world()[1], stage=3, bucket_mb=25)  # gradients leave at the end
    ids, started = torch.zeros(1, 4, dtype=torch.int64), list[int]()

    def watch(module: nn.Module, args: Any, out: Tensor) -> None:
        out.register_hook(lambda _: started.append(len(ledger.entries())))

    for block in model.blocks:
        block.register_forward_hook(watch)
    model(ids)  # which tells the order of use
    loss = model(ids).sum()
    ledger.clear()
    loss.backward()
    return started


def test_in_backward_too_the_next_unit_is_on_its_way_when_one_begins(ranks: World) -> None:
    """The head is whole still; each begins with all before it and the next one started."""
    wanted = [2, 3, 4] if ranks.world_size > 1 else [0, 0, 0]
    assert ranks.run(ahead_body) == [wanted] * ranks.world_size


def messages_body() -> list[dict[str, int]]:
    """Per stage: the exchanges of one step, and the buckets and segments that they are of."""
    seen = []
    for stage in (1, 2, 3):
        model, zero = build(stage)
        train(model, zero, range(1, 2))  # which tells the order of use
        zero.zero_grad()
        ledger.clear()
        backward(model, 1, 0, True)
        zero.step()
        units = zero._units
        parts = [] if units is None else [len(unit.segments) for unit in units._order]
        buckets = 0 if zero._reducer is None else len(zero._reducer.buckets)
        seen.append(
            {"calls": len(ledger.entries()), "buckets": buckets, "segments": sum(parts), "kept": sum(parts[-1:])}
        )
    return seen


def test_a_step_sends_each_bucket_once_and_gathers_each_segment_once_or_twice(ranks: World) -> None:
    """Stage 3 gathers in forward and again in backward, but for what forward ends with: parameters move once more than in stage 2."""
    sent = ranks.world_size > 1
    for first, second, third in ranks.run(messages_body):
        assert first["calls"] == 2 * sent
        assert second["calls"] == (second["buckets"] + 1) * sent
        assert third["calls"] == (third["buckets"] + 2 * third["segments"] - third["kept"]) * sent


def test_the_units_of_minigpt_are_its_embeddings_each_block_and_its_head() -> None:
    model = MiniGPT(num_layers=2)
    named = {id(m): name for name, m in model.named_modules()}
    units = [[named[id(m)] for m in unit] for unit in unit_modules(model)]
    assert units == [["tok_embed", "pos_embed"], ["blocks.0"], ["blocks.1"], ["ln_f", "head"]]
