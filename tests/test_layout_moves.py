"""A run saved at one layout goes on at any other: the whole state's bytes are the same, and so is the way on, in float64."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_cases import canonical

from minigpt_dist.checkpoint import load_sharded, load_whole
from minigpt_dist.config import ModelConfig, TrainConfig
from minigpt_dist.launch import World
from minigpt_dist.parallel.collectives import world
from minigpt_dist.runner import capture, restore_state
from minigpt_dist.worker import pieces_of, rank_body, resized

LOSS = 1e-11
# A vocabulary that neither 2, 3 nor 4 ranks divide, and heads that all do.
MODEL = ModelConfig(vocab=19, embed_dim=24, num_heads=12, num_layers=2, seq_len=8)
CONFIG = TrainConfig(
    world_size=1, micro_batches=4, batch=2, steps=4, checkpoint_step=2, dtype="float64", weight_decay=0.1, model=MODEL
)
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp 1": {"world_size": 1},
    "dp 4": {"world_size": 4},
    "dp 2, tp 2": {"world_size": 4, "tp": 2},
    "tp 2": {"world_size": 2, "tp": 2},
    "tp 4": {"world_size": 4, "tp": 4},
    "tp 3": {"world_size": 3, "tp": 3},
    "pp 2": {"world_size": 2, "pp": 2},
    "dp 2, pp 2": {"world_size": 4, "pp": 2, "schedule": "gpipe"},
    "tp 2, pp 2, interleaved": {"world_size": 4, "tp": 2, "pp": 2, "schedule": "interleaved"},
    "dp 2, ZeRO-3": {"world_size": 2, "zero_stage": 3},
    "dp 2, tp 2, ZeRO-2, sequence cut": {"world_size": 4, "tp": 2, "zero_stage": 2, "sequence_parallel": True},
}
QUICK = [("pp 2", "tp 2", True)]
MOVES = [
    pytest.param(before, after, tied, id=f"{before} to {after}{', tied' * tied}", marks=marks)
    for i, before in enumerate(LAYOUTS)
    for j, after in enumerate(LAYOUTS)
    if i != j
    for tied in [i > j]  # each pair of layouts with both models, one a direction
    for every in [pytest.mark.slow if (i + 3 * j) % 5 == 0 else pytest.mark.nightly]
    for marks in [() if (before, after, tied) in QUICK else every]
]


def config_of(layout: str, tied: bool) -> TrainConfig:
    config = replace(CONFIG, model=replace(MODEL, seq_len=8, tie_head=tied))
    return resized(config, **LAYOUTS[layout])


@pytest.fixture(scope="module")
def on_ranks() -> Iterator[Callable[..., list[Any]]]:
    """Runs a body on so many ranks, which live as long as the tests of this file."""
    alive: dict[int, World] = {}

    def run(body: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
        if world_size not in alive:
            alive[world_size] = World(world_size, deadline_s=60).__enter__()
        return alive[world_size].run(body, *args)

    yield run
    for each in alive.values():
        each.__exit__(None, None, None)


def losses(results: list[dict[str, Any]], after: int) -> list[float]:
    """The mean loss over ranks of each step after step `after`."""
    by_step = zip(*(result["records"] for result in results), strict=True)
    return [sum(r["loss"] for r in now) / len(now) for now in by_step if now[0]["step"] > after]


@pytest.fixture(scope="module")
def unbroken(on_ranks: Any) -> Iterator[Callable[[str, bool], tuple[Path, list[float]]]]:
    """The folder of a run that saved at step 2 of 4, and its losses from there on; each is made once."""
    with tempfile.TemporaryDirectory() as area:

        @functools.cache
        def made(layout: str, tied: bool) -> tuple[Path, list[float]]:
            folder, config = Path(area) / f"{layout}{tied}", config_of(layout, tied)
            folder.mkdir()
            results = on_ranks(rank_body, config.world_size, config.to_dict(), str(folder), False, [], "cpu")
            return folder, losses(results, 2)

        yield made


def reloading_body(config: dict[str, Any], source: str, folder: str) -> int:
    """Load a checkpoint into this layout, from another seed, and save what was loaded; the step it is of."""
    wanted, (N, rank) = TrainConfig.from_dict(config), world()
    pieces = pieces_of(wanted, Path(folder))
    torch.manual_seed(1234 + rank)
    model = pieces.model(wanted.model).to(getattr(torch, wanted.dtype))
    pieces.broadcast(model)
    optimizer = pieces.optimizer(model, wanted, N, rank)
    assert pieces.parts is not None
    parts = pieces.parts(model, optimizer)
    with pieces.gathered(optimizer):
        step = restore_state(pieces.load(Path(source), N, rank, parts=parts), model, optimizer)
        state = {**capture(step, model, optimizer), "parts": parts.to_plain()}
    pieces.save(state, Path(folder), step, wanted)
    return step


def without_rng(states: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**state, "rng": None} for state in states]


def by_name(folder: Path) -> Any:
    """The bytes of the whole state, each parameter's by its name: another layout has them in another order."""
    whole = load_whole(folder)
    (names,), (shard,) = whole["parts"]["vectors"], whole["optimizer"]["shards"]
    numels = [torch.Size(whole["parts"]["tensors"][name]["shape"]).numel() for name in names]
    flat = {
        kind: dict(zip(names, shard[kind].split(numels), strict=True)) for kind in ("master", "exp_avg", "exp_avg_sq")
    }
    steps, model = dict(zip(names, shard["steps"], strict=True)), whole["model"]
    rest = {key: value for key, value in whole["optimizer"].items() if key != "shards"}
    tensors = [canonical(dict(sorted(each.items()))) for each in (*flat.values(), steps, model)]
    return tensors, canonical(rest), whole["step"]


def there_and_back(on_ranks: Any, source: Path, here: TrainConfig, there: TrainConfig, folder: Path) -> None:
    """Reload into the other layout and save it there, and back; both have the bytes of the source."""
    for name in ("there", "back"):
        (folder / name).mkdir()
    assert set(on_ranks(reloading_body, there.world_size, there.to_dict(), str(source), str(folder / "there"))) == {2}
    assert by_name(folder / "there") == by_name(source)
    on_ranks(reloading_body, here.world_size, here.to_dict(), str(folder / "there"), str(folder / "back"))
    first, back = (without_rng(load_sharded(each, here.world_size)) for each in (source, folder / "back"))
    assert canonical(back) == canonical(first)


@pytest.mark.parametrize(("before", "after", "tied"), MOVES)
def test_a_checkpoint_moves_there_and_back_with_its_bytes_and_trains_on_there(
    before: str, after: str, tied: bool, on_ranks: Any, unbroken: Any, tmp_path: Path
) -> None:
    (source, expected), here, there = unbroken(before, tied), config_of(before, tied), config_of(after, tied)
    there_and_back(on_ranks, source, here, there, tmp_path)
    arguments = (there.to_dict(), str(tmp_path), True, [], "cpu", str(source))
    on = losses(on_ranks(rank_body, there.world_size, *arguments), 2)
    assert on == pytest.approx(expected, abs=LOSS)


@pytest.mark.slow  # a run each
@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "float16", "loss_scale": 2.0**40},  # the first steps overflow
        {"dtype": "bfloat16"},
        {"offload": "disk"},
        {"recompute": True, "model": replace(MODEL, dropout=0.1)},
        {"guard": "skip", "spike": 1.0001},
    ],
    ids=str,
)
def test_what_else_a_state_holds_moves_too(changes: dict[str, Any], on_ranks: Any, tmp_path: Path) -> None:
    here, there = (replace(config_of(layout, True), **changes) for layout in ("dp 2, tp 2", "tp 2, pp 2, interleaved"))
    (tmp_path / "run").mkdir()
    on_ranks(rank_body, 4, here.to_dict(), str(tmp_path / "run"), False, [], "cpu")
    there_and_back(on_ranks, tmp_path / "run", here, there, tmp_path)
