"""Layouts change whatever wrote or reads: older checkpoints, exports, savers in the background; and in what memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from checkpoint_cases import canonical
from layouts_by_hand import (
    CUBE,
    CUBE_TIED,
    MODEL,
    ONE,
    Layer,
    Spread,
    parts_by_hand,
    places,
    state_by_hand,
    states_by_hand,
    whole_of,
)
from peak_memory import Peak

from minigpt_dist.checkpoint import (
    AsyncSaver,
    CheckpointError,
    SecondTier,
    export_dcp,
    export_safetensors,
    import_dcp,
    latest_step_folder,
    load_at_layout,
    load_resharded,
    load_whole,
    save_sharded,
)
from minigpt_dist.checkpoint.relayout import relaid


def silent(states: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The states as they were saved before they said what they hold."""
    return [{key: value for key, value in state.items() if key != "parts"} for state in states]


def test_a_data_parallel_checkpoint_that_says_nothing_goes_on_in_a_data_parallel_layout(tmp_path: Path) -> None:
    save_sharded(silent(states_by_hand(MODEL, Spread(3, 1, (0,) * 5))), tmp_path, 10)
    two = Spread(2, 1, (0,) * 5)
    loaded = [load_at_layout(tmp_path, parts_by_hand(MODEL, two, False, place), place[1], 2) for place in places(two)]
    assert canonical(loaded) == canonical(load_resharded(tmp_path, 2))


def test_a_checkpoint_that_says_nothing_goes_on_in_the_layout_that_wrote_it(tmp_path: Path) -> None:
    save_sharded(silent(CUBE_TIED), tmp_path, 10)
    own = load_at_layout(tmp_path, parts_by_hand(MODEL, CUBE, True, (1, 0, 1)), 5, 8)
    assert canonical(own) == canonical(silent(CUBE_TIED)[5])


@pytest.mark.parametrize("after", [Spread(1, 2, (0,) * 5), Spread(2, 1, (0, 0, 0, 1, 1))])
def test_a_checkpoint_that_says_nothing_is_refused_elsewhere(after: Spread, tmp_path: Path) -> None:
    save_sharded(silent(states_by_hand(MODEL, Spread(3, 1, (0,) * 5))), tmp_path, 10)
    with pytest.raises(CheckpointError, match="expected states that say which parts they hold, to go on in another"):
        load_at_layout(tmp_path, parts_by_hand(MODEL, after, False, (0, 0, 0)), 0, after.world_size)


def test_the_plain_loader_refuses_what_is_cut_along_other_axes(tmp_path: Path) -> None:
    save_sharded(CUBE_TIED, tmp_path, 10)
    with pytest.raises(CheckpointError, match="rank 1"):
        load_resharded(tmp_path, 1)


def test_the_exported_model_is_whole_whatever_the_layout(tmp_path: Path) -> None:
    save_sharded(CUBE_TIED, tmp_path / "run", 10)
    written = export_safetensors(tmp_path / "run", tmp_path / "model.safetensors")
    whole = whole_of(MODEL, "model")
    expected = {**whole, "again": whole["tok_embed.weight"]}
    assert canonical({name: written[name] for name in expected}) == canonical(expected)


@pytest.mark.slow  # torch's package takes a second to import
def test_a_state_that_went_through_torchs_format_goes_on_at_any_layout(tmp_path: Path) -> None:
    save_sharded(CUBE_TIED, tmp_path / "run", 10)
    export_dcp(tmp_path / "run", tmp_path / "dcp")
    save_sharded([import_dcp(tmp_path / "dcp")], tmp_path / "again", 10)
    for rank, place in enumerate(places(CUBE)):
        loaded = load_at_layout(tmp_path / "again", parts_by_hand(MODEL, CUBE, True, place), rank, 8)
        assert canonical(loaded) == canonical(CUBE_TIED[rank])


def test_the_whole_of_one_ranks_checkpoint_is_its_state(tmp_path: Path) -> None:
    save_sharded(states_by_hand(MODEL, ONE), tmp_path, 10)
    assert canonical(load_whole(tmp_path)) == canonical(states_by_hand(MODEL, ONE)[0])


def test_what_was_saved_in_the_background_or_copied_to_a_second_tier_moves_too(tmp_path: Path) -> None:
    def write(states: dict[str, Any], step: int) -> None:
        save_sharded([states[str(rank)] for rank in range(8)], tmp_path / "run", step)

    with AsyncSaver(write) as saver:
        saver.save({str(rank): state for rank, state in enumerate(CUBE_TIED)}, 10)
    with SecondTier(tmp_path / "tier") as tier:
        tier.submit(latest_step_folder(tmp_path / "run"))
    loaded = load_at_layout(tmp_path / "tier", parts_by_hand(MODEL, ONE, True, (0, 0, 0)), 0, 1)
    assert canonical(loaded) == canonical(state_by_hand(MODEL, ONE, True, (0, 0, 0)))


@pytest.mark.slow  # memory is followed operation by operation
def test_a_load_holds_one_whole_state_beside_what_it_reads_and_what_it_returns() -> None:
    layers = tuple(Layer(f"layer.{i}", (100, 50), i % 2) for i in range(40))
    before, after = Spread(2, 2, tuple(i % 2 for i in range(40))), Spread(4, 2, (0,) * 40)
    states, P = states_by_hand(layers, before), 40 * 100 * 50
    with Peak() as seen:
        own = relaid(states, parts_by_hand(layers, after, False, (0, 1, 1)), 8)
    mine = 4 * (sum(t.numel() for t in own["model"].values()) + 3 * own["optimizer"]["shards"][0]["numel"])
    who_brought_it, temporary = 8 * P, 100 * 100 * 50  # of one layer
    assert 16 * P < seen.most <= 16 * P + mine + who_brought_it + temporary
