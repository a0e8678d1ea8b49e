"""ZeRO stages 2 and 3: the bits of stage 1, whatever takes part; less memory, as storages show; checkpoints that move between stages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from minigpt_dist import MiniGPT, ZeroOptimizer
from minigpt_dist.launch import LaunchError, RankError, World, ledger, run_world
from minigpt_dist.memory import held, live_bytes
from minigpt_dist.model import Block
from minigpt_dist.parallel.collectives import world
from minigpt_dist.parallel.stages.units import unit_modules
from minigpt_dist.runner import capture, restore_state
from minigpt_dist.trace import digest, state_digests

QUICK = (3,)  # which exercises padding
SIZES = [N if N in QUICK else pytest.param(N, marks=pytest.mark.slow) for N in (1, 2, 3, 4, 8)]
BUCKET_MB = 2e-3  # a bucket for every few parameters of these models


@pytest.fixture(scope="module", params=SIZES)
def ranks(request: pytest.FixtureRequest) -> Iterator[World]:
    with World(request.param, deadline_s=60) as live:
        yield live


class Odd(nn.Module):
    """Blocks, a tied weight, a frozen layer that is used, one that never is, one that is at odd steps, a parameter of the root's own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(12, 8)
        self.frozen, self.unused, self.odd = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.frozen.requires_grad_(False)
        self.blocks = nn.ModuleList(Block(8, 2) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(8))
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, use_odd: bool) -> Tensor:
        x = self.frozen(self.embed(ids))
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head((self.odd(x) if use_odd else x) * self.scale)
        return out


def backward(model: nn.Module, step: int, micro: int, use_odd: bool) -> float:
    """One micro-batch of this rank's own."""
    draw = torch.Generator().manual_seed(step * 100 + world()[1] * 10 + micro)
    ids = torch.randint(0, 12, (3, 5), generator=draw)
    loss = nn.functional.cross_entropy(model(ids, use_odd).flatten(0, 1).float(), ids.flatten())
    loss.backward()
    return loss.item()


def train(model: nn.Module, zero: ZeroOptimizer, steps: range, micros: int = 1, odd_ranks: str = "all") -> list[Any]:
    """Per step: the losses, and digests of parameters and of the optimizer's state."""
    seen = []
    for step in steps:
        zero.zero_grad()
        use_odd = step % 2 == 1 and (odd_ranks == "all" or world()[1] == 0)
        losses = []
        for m in range(micros):
            with zero.no_sync() if m < micros - 1 else nullcontext():
                losses.append(backward(model, step, m, use_odd))
            zero.fold()
        zero.step()
        with zero.gathered():
            named = {name: digest(p) for name, p in model.named_parameters()}
        seen.append([losses, named, state_digests(zero.state_dict())])
    return seen


def build(stage: int, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[nn.Module, ZeroOptimizer]:
    model, N, rank = Odd().to(dtype), world()[0], world()[1]
    return model, ZeroOptimizer(model, N, rank, lr=1e-2, stage=stage, bucket_mb=BUCKET_MB, **options)


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


def test_the_units_of_minigpt_are_its_embeddings_each_block_and_its_head() -> None:
    model = MiniGPT(num_layers=2)
    named = {id(m): name for name, m in model.named_modules()}
    units = [[named[id(m)] for m in unit] for unit in unit_modules(model)]
    assert units == [["tok_embed", "pos_embed"], ["blocks.0"], ["blocks.1"], ["ln_f", "head"]]


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
