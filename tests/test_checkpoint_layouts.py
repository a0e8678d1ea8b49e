"""A checkpoint of any layout is, cut anew for any other, what that one would have saved: held by hand-made states of both."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_cases import canonical
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts_by_hand import (
    CUBE,
    CUBE_TIED,
    KINDS,
    MODEL,
    Layer,
    Layers,
    Spread,
    layer_lists,
    parts_by_hand,
    places,
    shard,
    spreads,
    state_by_hand,
    states_by_hand,
)
from torch import Tensor

from minigpt_dist.checkpoint import load_at_layout, save_sharded
from minigpt_dist.checkpoint.relayout import merged, relaid
from minigpt_dist.parts import Part, Parts


def relays(data: st.DataObject, layers: Layers, tied: bool) -> None:
    before, after = data.draw(spreads(len(layers))), data.draw(spreads(len(layers)))
    states = states_by_hand(layers, before, tied)
    for place in data.draw(st.permutations(places(after)))[:3]:
        cut = relaid(states, parts_by_hand(layers, after, tied, place), after.world_size)
        assert canonical(cut) == canonical(state_by_hand(layers, after, tied, place))


DRAWN = (st.data(), layer_lists(), st.booleans())


@settings(deadline=None, max_examples=10)
@given(*DRAWN)
def test_cut_anew_for_another_layout_is_what_that_one_saves(data: st.DataObject, layers: Layers, tied: bool) -> None:
    relays(data, layers, tied)


@pytest.mark.slow  # as above, of many more
@settings(deadline=None, max_examples=300)
@given(*DRAWN)
def test_cut_anew_for_any_other_layout_is_what_that_one_saves(data: st.DataObject, layers: Layers, tied: bool) -> None:
    relays(data, layers, tied)


@pytest.mark.slow  # as above, the other way
@settings(deadline=None, max_examples=100)
@given(*DRAWN)
def test_joined_on_one_rank_and_cut_again_is_what_was(data: st.DataObject, layers: Layers, tied: bool) -> None:
    spread = data.draw(spreads(len(layers)))
    states = states_by_hand(layers, spread, tied)
    whole = merged(states)
    again = [relaid([whole], parts_by_hand(layers, spread, tied, place), spread.world_size) for place in places(spread)]
    assert canonical(again) == canonical(states)


@pytest.mark.parametrize("vectors", [(("w", "w"),), (("w",), ("w",)), (("w",), ()), (("v",),)])
def test_a_parameter_lies_in_one_vector_and_a_vector_has_one(vectors: tuple[tuple[str, ...], ...]) -> None:
    with pytest.raises(ValueError, match="vectors are"):
        Parts({"w": Part((2,))}, vectors)


def test_a_state_without_its_pickle_or_its_processes_says_which_parts_it_holds() -> None:
    parts = CUBE_TIED[-1]["parts"]
    assert parts["vectors"] == [["blocks.0.qkv.weight", "ln_f.weight", "again"]]
    assert parts["tensors"]["again"] == {
        "shape": [7, 4],
        "cut": {"dim": 0, "length": 7, "blocks": 1},
        "index": 1,
        "of": 2,
        "tied_to": "tok_embed.weight",
    }


def test_the_layout_that_wrote_goes_on_with_its_own_file_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states = [{**state, "rng": torch.tensor([rank])} for rank, state in enumerate(CUBE_TIED)]
    save_sharded(states, tmp_path, 10)
    monkeypatch.setattr("minigpt_dist.checkpoint.relayout.relaid", lambda *_: pytest.fail("other files were read"))
    own = load_at_layout(tmp_path, parts_by_hand(MODEL, CUBE, True, (1, 0, 1)), 5, 8)
    assert canonical(own) == canonical(states[5])


def test_another_layout_of_as_many_ranks_is_not_taken_for_the_one_that_wrote(tmp_path: Path) -> None:
    save_sharded(CUBE_TIED, tmp_path, 10)
    swapped = Spread(4, 2, (0,) * 5)
    for rank, place in ((1, (0, 0, 1)), (6, (0, 3, 0))):
        loaded = load_at_layout(tmp_path, parts_by_hand(MODEL, swapped, True, place), rank, 8)
        assert canonical(loaded) == canonical(state_by_hand(MODEL, swapped, True, place))


def test_a_tied_weight_of_two_stages_is_one_parameter_of_the_whole() -> None:
    whole = merged(CUBE_TIED)
    assert [sorted(vector) for vector in whole["parts"]["vectors"]] == [sorted(layer.name for layer in MODEL)]
    assert list(whole["model"]).count("again") == 1


def test_the_order_of_ranks_is_that_which_states_say_not_that_of_files(tmp_path: Path) -> None:
    save_sharded([CUBE_TIED[rank] for rank in (1, 0, 3, 2, 5, 4, 7, 6)], tmp_path, 10)
    for rank in (0, 5):
        loaded = load_at_layout(tmp_path, parts_by_hand(MODEL, CUBE, True, places(CUBE)[rank]), rank, 8)
        assert canonical(loaded) == canonical(CUBE_TIED[rank])


def test_slices_of_another_cut_are_made_even_at_the_same_layout(tmp_path: Path) -> None:
    two = Spread(2, 1, (0,) * 5)
    states = states_by_hand(MODEL, two)
    first, second = shard(states, 0), shard(states, 1)
    for kind in KINDS[1:]:
        flat = torch.cat([first[kind], second[kind]])
        first[kind], second[kind] = flat[:7], flat[7:]
    first["numel"], second["offset"], second["numel"] = 7, 7, first["total"] - 7
    save_sharded(states, tmp_path, 10)
    loaded = [load_at_layout(tmp_path, parts_by_hand(MODEL, two, False, place), place[1], 2) for place in places(two)]
    assert canonical(loaded) == canonical(states_by_hand(MODEL, two))


def test_a_random_stream_belongs_to_its_layout_even_where_the_slice_is_the_same(tmp_path: Path) -> None:
    one = (Layer("w", (1,)),)
    save_sharded([{**state, "rng": torch.ones(1)} for state in states_by_hand(one, Spread(2, 1, (0,)))], tmp_path, 10)
    three = Spread(3, 1, (0,))
    assert load_at_layout(tmp_path, parts_by_hand(one, three, False, (0, 0, 0)), 0, 3)["rng"] is None


def test_no_two_saved_states_are_in_memory_at_once() -> None:
    alive: list[weakref.ref[Tensor]] = []

    def one_by_one() -> Iterator[dict[str, Any]]:
        for place in places(CUBE):
            assert [ref() for ref in alive[:-1]] == [None] * len(alive[:-1])
            assert not alive or alive[-1]() is None
            state = state_by_hand(MODEL, CUBE, True, place)
            alive.append(weakref.ref(state["optimizer"]["shards"][0]["master"]))
            yield state
            del state

    relaid(one_by_one(), parts_by_hand(MODEL, Spread(1, 1, (0,) * 5), True, (0, 0, 0)), 1)
    assert len(alive) == 8


def test_what_was_loaded_shares_no_memory_with_what_was_read() -> None:
    (state,) = states_by_hand(MODEL, Spread(1, 1, (0,) * 5))
    loaded = relaid([state], Parts.from_plain(state["parts"]), 1)
    for tensor in (*loaded["model"].values(), *(loaded["optimizer"]["shards"][0][kind] for kind in KINDS[1:])):
        tensor.fill_(3.0)
    assert canonical(state) == canonical(states_by_hand(MODEL, Spread(1, 1, (0,) * 5))[0])


def test_a_stage_may_have_fewer_flat_vectors_than_the_model() -> None:
    (whole,) = states_by_hand(MODEL, Spread(1, 1, (0,) * 5))
    two = Parts.from_plain({**whole["parts"], "vectors": [whole["parts"]["vectors"][0][:2], ["blocks.0.qkv.weight"]]})
    cut = relaid([whole], two, 1)
    assert [shard["total"] for shard in cut["optimizer"]["shards"]] == [32, 48]
    assert [shard["steps"] for shard in cut["optimizer"]["shards"]] == [[1, 2], [3]]
