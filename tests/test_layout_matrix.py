"""The matrix of layouts: data x tensor x pipeline ranks with any ZeRO stage, precision, schedule and model, against one process.

Any type has its bits at every step, wherever only data and pipeline axes are used; tensor axes add in another order, and stay within
float64's bounds. So does a float64 run that is clipped: its norm's last bit depends on the cut, which narrower types round away.
"""

from __future__ import annotations

import contextlib
import functools
import math
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from one_process import one_process_body

from minigpt_dist.cli.claims import optimizer_share
from minigpt_dist.config import ModelConfig, TrainConfig
from minigpt_dist.launch import World
from minigpt_dist.layout import CHUNKS
from minigpt_dist.parallel.mesh import coordinates_of
from minigpt_dist.worker import rank_body, resized

LOSS, NORM, PARAMETER = 1e-12, 1e-10, 1e-8  # of float64, between orders of sums, after a few steps
Worlds = Callable[[int], World]


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    """A live world of each size, started when it is first asked for."""
    with contextlib.ExitStack() as stack:
        yield functools.cache(lambda size: stack.enter_context(World(size, deadline_s=60)))


@st.composite
def configs(draw: st.DrawFn, ranks: int) -> TrainConfig:
    """Any layout of at most `ranks` ranks, with a model that it fits and whatever composes with it."""
    axes = [
        (d, t, p) for d in range(1, ranks + 1) for t in (1, 2, 4) for p in range(1, ranks + 1) if d * t * p <= ranks
    ]
    dp, tp, pp = draw(st.sampled_from(axes))
    schedule = draw(st.sampled_from(sorted(CHUNKS))) if pp > 1 else "1f1b"
    stages = pp * CHUNKS[schedule]
    layers = draw(st.integers(max(1, stages - 2), max(1, stages - 2) + 2))
    heads = draw(st.sampled_from([h for h in (1, 2, 4) if h % tp == 0]))
    sequence = tp > 1 and draw(st.booleans())
    groups = draw(st.integers(1, 2 if schedule == "interleaved" else 4))
    model = ModelConfig(
        vocab=draw(st.integers(5, 20)),
        embed_dim=heads * draw(st.sampled_from([2, 4])),
        num_heads=heads,
        num_layers=layers,
        seq_len=draw(st.sampled_from([4, 8] if sequence else [2, 3, 8])),
        mlp_ratio=draw(st.integers(1, 3)),
        dropout=draw(st.sampled_from([0.0, 0.2])) if tp == 1 else 0.0,
        tie_head=draw(st.booleans()),
    )
    return TrainConfig(
        world_size=dp * tp * pp,
        tp=tp,
        pp=pp,
        schedule=schedule,
        sequence_parallel=sequence,
        steps=3,
        checkpoint_step=2,
        seed=draw(st.integers(0, 99)),
        batch=draw(st.integers(1, 2)),
        micro_batches=groups * pp if schedule == "interleaved" else groups,
        dtype="float64" if tp > 1 else draw(st.sampled_from(["float32", "float32", "float64", "bfloat16", "float16"])),
        loss_scale=draw(st.sampled_from([2.0**16, 2.0**40])),
        zero_stage=draw(st.integers(1, 3)) if pp == 1 else 1,
        recompute=draw(st.booleans()),
        offload=draw(st.sampled_from(["none", "memory"])),
        max_norm=draw(st.sampled_from([0.0, 0.5])),
        weight_decay=draw(st.sampled_from([0.0, 0.1])),
        model=model,
    )


def trained(worlds: Worlds, config: TrainConfig, folder: str, source: str | None = None) -> list[list[dict[str, Any]]]:
    """Records by rank and step."""
    watch = ["digests", "bytes"]
    ranks = worlds(config.world_size).run(rank_body, config.to_dict(), folder, source is not None, watch, "cpu", source)
    return [rank["records"] for rank in ranks]


def unlike_one_process(worlds: Worlds, config: TrainConfig, records: list[list[dict[str, Any]]]) -> list[str]:
    """Where the run is not the one process', step by step."""
    exact = config.tp == 1 and not (config.dtype == "float64" and config.max_norm)
    (alone,) = worlds(1).run(one_process_body, config.to_dict())
    found = []
    for step in range(1, config.steps + 1):
        now = [rank[step] for rank in records]
        losses = [r["loss"] for r in now]
        wanted = [
            alone["losses"][step - 1][coordinates_of(config.layout, rank).dp] for rank in range(config.world_size)
        ]
        norm = math.sqrt(math.fsum(r["grad_sq"] for r in now))
        if exact and losses != wanted:
            found.append(f"losses at step {step}: {losses}, but should be {wanted}")
        if any(abs(a - b) > LOSS * abs(b) for a, b in zip(losses, wanted, strict=True)):
            found.append(f"losses at step {step}: {losses}, but should be near {wanted}")
        if norm != pytest.approx(alone["norms"][step], rel=NORM, nan_ok=True):
            found.append(f"gradient norm at step {step}: {norm}, but should be near {alone['norms'][step]}")
    if exact:
        bits = [
            [rank[step]["params"] == alone["digests"][step] for rank in records] for step in range(config.steps + 1)
        ]
        found += [f"bits of parameters at step {step}: {same}" for step, same in enumerate(bits) if not all(same)]
    if abs(records[0][-1]["param_norm"] - alone["norm"]) > PARAMETER * alone["norm"]:
        found.append(f"norm of parameters: {records[0][-1]['param_norm']}, but should be near {alone['norm']}")
    return found


def broken_invariants(config: TrainConfig, records: list[list[dict[str, Any]]]) -> list[str]:
    """Replicas that differ, and ranks that hold other than their share of optimizer state."""
    first, found = records[0], []
    for rank, mine in enumerate(records):
        found += [
            f"rank {rank} differs at step {r['step']}"
            for r, f in zip(mine, first, strict=True)
            if r["params"] != f["params"]
        ]
        share, _ = optimizer_share(config, coordinates_of(config.layout, rank).pp)
        held = mine[-1]["bytes"]["optimizer"]
        found += [f"rank {rank} holds {held}, not {share}"] if held != share else []
    return found


def verdict(worlds: Worlds, config: TrainConfig) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        records = trained(worlds, config, folder)
        again = Path(folder, "resumed")
        again.mkdir()
        resumed = trained(worlds, config, str(again), folder)
        alone = resized(config, 1, tp=1, pp=1, sequence_parallel=False)
        (moved,) = trained(worlds, alone, str(again), folder)
    found = unlike_one_process(worlds, config, records) + broken_invariants(config, records)
    found += [] if moved[0]["params"] == records[0][2]["params"] else ["the checkpoint has other bytes in one process"]
    for rank, (new, old) in enumerate(zip(resumed, records, strict=True)):
        same = [(r["params"], r["optimizer"]) for r in new] == [(r["params"], r["optimizer"]) for r in old[2:]]
        found += [] if same else [f"resumed rank {rank} differs"]
    return found


SMALL = TrainConfig(
    steps=3, checkpoint_step=2, model=ModelConfig(vocab=11, embed_dim=8, num_heads=2, num_layers=2, seq_len=4)
)
TIED = replace(SMALL.model, tie_head=True)


@settings(deadline=None, max_examples=max(1, settings().max_examples // 5))
@given(config=configs(ranks=4))
@example(config=replace(SMALL, pp=2, micro_batches=3, max_norm=0.5, weight_decay=0.1, model=TIED))
@example(
    config=replace(
        SMALL, tp=2, pp=2, micro_batches=2, dtype="float64", sequence_parallel=True, max_norm=0.5, model=TIED
    )
)
def test_any_layout_of_up_to_four_ranks_is_one_process(worlds: Worlds, config: TrainConfig) -> None:
    assert verdict(worlds, config) == []


@pytest.mark.slow  # up to eight ranks on however few cores there are
@settings(deadline=None, max_examples=max(12, settings().max_examples))
@given(config=configs(ranks=8))
@example(config=replace(SMALL, world_size=8, tp=2, pp=2, micro_batches=2, dtype="float64", max_norm=0.5, model=TIED))
@example(config=replace(SMALL, world_size=8, pp=4, micro_batches=4, recompute=True, model=replace(TIED, dropout=0.1)))
@example(
    config=replace(
        SMALL,
        world_size=8,
        pp=2,
        schedule="interleaved",
        micro_batches=4,
        max_norm=0.5,
        model=replace(TIED, num_layers=3),
    )
)
def test_any_layout_of_up_to_eight_ranks_is_one_process(worlds: Worlds, config: TrainConfig) -> None:
    assert verdict(worlds, config) == []
