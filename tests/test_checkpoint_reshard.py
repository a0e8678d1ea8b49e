"""A checkpoint of N ranks loads at M ranks with the same bytes, or is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_cases import canonical, rank_state, world_states
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minigpt_dist.checkpoint import CheckpointError, load_resharded, merge_states, save_sharded, split_state

SIZES = st.integers(1, 9)
TOTALS = st.integers(0, 12) | st.sampled_from([97, 101, 128, 997])


def without_rng(states: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**state, "rng": None} for state in states]


@settings(deadline=None, max_examples=60)
@given(total=TOTALS, n=SIZES, m=SIZES, k=SIZES)
def test_cutting_anew_any_number_of_times_is_cutting_once(total: int, n: int, m: int, k: int) -> None:
    states = world_states(n, total)
    for size in (m, k):
        states = split_state(merge_states(states), size)
    assert canonical(states) == canonical(without_rng(world_states(k, total)))


@settings(deadline=None, max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(total=TOTALS, n=st.integers(1, 5), m=st.integers(1, 5))
def test_a_checkpoint_loads_at_another_world_size_as_if_saved_there(total: int, n: int, m: int, tmp_path: Path) -> None:
    save_sharded(world_states(n, total), tmp_path, 10)
    expected = world_states(m, total) if m == n else without_rng(world_states(m, total))
    assert canonical(load_resharded(tmp_path, m)) == canonical(expected)


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_padding_is_dropped_when_cut_anew(world_size: int) -> None:
    padded = world_states(4)
    for state in padded:
        shard = state["optimizer"]["shards"][0]
        for name in ("master", "exp_avg", "exp_avg_sq"):
            shard[name] = torch.cat([shard[name], torch.zeros(3 - shard["numel"])])
    whole = merge_states(padded)
    assert canonical(whole) == canonical(without_rng(world_states(1))[0])
    assert canonical(split_state(whole, world_size)) == canonical(without_rng(world_states(world_size)))


def test_slices_that_ranks_hold_in_another_order_are_joined_by_offset() -> None:
    assert canonical(merge_states(world_states(4)[::-1])) == canonical(without_rng(world_states(1))[0])


def test_uneven_slices_of_another_cut_are_made_even_at_the_same_world_size_and_keep_their_rng(tmp_path: Path) -> None:
    states = world_states(2)
    first, second = (state["optimizer"]["shards"][0] for state in states)
    for name in ("master", "exp_avg", "exp_avg_sq"):
        whole = torch.cat([first[name], second[name]])
        first[name], second[name] = whole[:7], whole[7:]
    first["numel"], second["offset"], second["numel"] = 7, 7, 3
    save_sharded(states, tmp_path, 10)
    assert canonical(load_resharded(tmp_path, 2)) == canonical(world_states(2))


def test_a_flat_state_right_under_optimizer_is_cut_too() -> None:
    flat = [{"optimizer": state["optimizer"]["shards"][0]} for state in world_states(3)]
    assert [len(state["optimizer"]["master"]) for state in split_state(merge_states(flat), 4)] == [3, 3, 3, 1]


def test_a_count_that_only_its_owner_knows_reaches_all() -> None:
    states = world_states(3)
    for state, steps in zip(states, ([3, 0], [3, 3], [0, 3]), strict=True):
        shard_of([state], 0)["steps"] = steps
    assert canonical(split_state(merge_states(states), 2)) == canonical(without_rng(world_states(2)))


def test_a_parameter_that_was_never_updated_counts_nothing() -> None:
    states = world_states(3)
    for state in states:
        shard_of([state], 0)["steps"] = [0, 1]
    assert shard_of([merge_states(states)], 0)["steps"] == [0, 1]


def test_new_slices_share_no_memory() -> None:
    whole = rank_state(0, 1)
    first, second = split_state(whole, 2)
    first["optimizer"]["shards"][0]["master"].zero_()
    assert canonical(second) == canonical(without_rng(world_states(2))[1])
    assert canonical(whole) == canonical(rank_state(0, 1))


def shard_of(states: list[dict[str, Any]], rank: int) -> dict[str, Any]:
    shard: dict[str, Any] = states[rank]["optimizer"]["shards"][0]
    return shard


WRONG: dict[str, tuple[Callable[[list[dict[str, Any]]], object], str]] = {
    "a hole": (lambda s: shard_of(s, 1).update(offset=5), "expected a slice at offset 4, found one at 5"),
    "an overlap": (lambda s: shard_of(s, 1).update(offset=3), "expected a slice at offset 4, found one at 3"),
    "a slice twice": (
        lambda s: shard_of(s, 2).update(offset=4, numel=2),
        "expected a slice at offset 6, found one at 4",
    ),
    "a missing end": (lambda s: shard_of(s, 2).update(numel=1), "expected slices of 10 elements, found 9"),
    "totals that differ": (lambda s: shard_of(s, 2).update(total=11), "those of rank 2 are not rank 0's"),
    "counts that differ": (lambda s: shard_of(s, 1).update(steps=[3, 4]), r"/steps/1: expected one .* found \[3, 4\]"),
    "counts of too few": (lambda s: shard_of(s, 1).update(steps=[3]), "/steps: expected lists of one length"),
    "counts that are none": (lambda s: shard_of(s, 1).update(steps=None), "/steps: expected lists of one length"),
    "a dtype that differs": (
        lambda s: shard_of(s, 1).update(master=shard_of(s, 1)["master"].double()),
        "/optimizer/shards/0/master: expected tensors of one dtype on all ranks",
    ),
    "a moment that one rank lacks": (
        lambda s: shard_of(s, 1).pop("exp_avg"),
        "/exp_avg: expected tensors of one dtype",
    ),
    "a model that differs in one bit": (
        lambda s: s[1]["model"].update(w=s[1]["model"]["w"].nextafter(torch.tensor(9.0))),
        "expected the same /model/w on all ranks, but that of rank 1",
    ),
    "no slice on one rank": (
        lambda s: s[1]["optimizer"].pop("shards"),
        r"rank 1 has slices at \[\], rank 0 at \['/optimizer/shards/0'\]",
    ),
    "no slice on the last rank": (
        lambda s: s[2]["optimizer"].pop("shards"),
        r"rank 2 has slices at \[\], rank 0 at \['/optimizer/shards/0'\]",
    ),
    "counts that the last rank has not": (
        lambda s: shard_of(s, 2).update(steps=None),
        "/steps: expected lists of one length",
    ),
    "counts that the first rank lacks": (lambda s: shard_of(s, 0).pop("steps"), "/steps: expected lists of one length"),
    "a tensor that one rank lacks": (
        lambda s: s[1]["model"].update(w=None),
        "expected the same values on all ranks, but those of rank 1",
    ),
    "bytes of another shape": (
        lambda s: s[1]["model"].update(w=s[1]["model"]["w"].reshape(-1, 1)),
        "expected the same /model/w on all ranks, but that of rank 1",
    ),
    "bytes of another dtype": (
        lambda s: s[1]["model"].update(w=s[1]["model"]["w"].view(torch.int32)),
        "expected the same /model/w on all ranks, but that of rank 1",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_ranks_that_do_not_fit_together_are_refused(name: str, tmp_path: Path) -> None:
    change, message = WRONG[name]
    states = world_states(3)
    change(states)
    save_sharded(states, tmp_path, 10)
    with pytest.raises(
        CheckpointError, match=f"step-00000010: expected states that can be cut anew, found .*{message}"
    ):
        load_resharded(tmp_path, 2)


@pytest.mark.parametrize(
    "change",
    [
        *({"offset": -1}, {"numel": -1}, {"numel": 11}, {"offset": 8}),
        *({"master": torch.zeros(2, 2)}, {"master": torch.zeros(5, 2)}, {"exp_avg": torch.zeros(3)}),
    ],
)
def test_a_slice_that_cannot_be_is_refused_when_saved(change: dict[str, Any], tmp_path: Path) -> None:
    state = rank_state(0, 2)
    shard_of([state], 0).update(change)
    with pytest.raises(ValueError, match="state/optimizer/shards/0"):
        save_sharded([state], tmp_path / "new", 1)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("world_size", [0, -1, 2.0, True, None])
def test_a_world_size_that_is_no_count_is_refused(world_size: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="world_size is"):
        load_resharded(tmp_path, world_size)
