"""A checkpoint of any layout is, cut anew for any other, what that one would have saved: held by hand-made states of both."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from checkpoint_cases import canonical
from hypothesis import given, settings
from hypothesis import strategies as st
from peak_memory import Peak
from torch import Tensor

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
from minigpt_dist.checkpoint.relayout import merged, relaid
from minigpt_dist.cut import Cut
from minigpt_dist.parts import Part, Parts

KINDS = ("model", "master", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Layer:
    """A parameter of a model that is nothing but a list of them. `cut_dim`: along which tensor parallelism cuts it, in `blocks`."""

    name: str
    shape: tuple[int, ...]
    cut_dim: int | None = None
    blocks: int = 1


Layers: TypeAlias = tuple[Layer, ...]


@dataclass(frozen=True)
class Spread:
    """A layout: `stages[i]` is the pipeline rank of layer i."""

    dp: int
    tp: int
    stages: tuple[int, ...]

    @property
    def pp(self) -> int:
        return max(self.stages) + 1

    @property
    def world_size(self) -> int:
        return self.dp * self.tp * self.pp


@functools.lru_cache
def whole_of(layers: Layers, kind: str) -> dict[str, Tensor]:
    """Every element another number, but for one that is no number and one that is minus zero."""
    made, first = {}, KINDS.index(kind) * 10_000.0
    for layer in layers:
        numel = torch.Size(layer.shape).numel()
        made[layer.name] = torch.arange(first, first + numel).view(layer.shape)
        first += numel
    last = list(made.values())[-1].view(-1)
    last[:1], last[-1:] = torch.nan, -0.0
    return made


def cut_by_hand(layer: Layer, whole: Tensor, tp: int, index: int) -> Tensor:
    """As a tensor-parallel rank holds it: of each block one of `tp` equal parts, the last ones short and filled up with zeros."""
    if layer.cut_dim is None:
        return whole
    parts = []
    for block in whole.chunk(layer.blocks, layer.cut_dim):
        rows = block.movedim(layer.cut_dim, 0)
        each = -(-len(rows) // tp)
        mine = rows[index * each : (index + 1) * each]
        parts.append(torch.cat([mine, mine.new_zeros(each - len(mine), *rows.shape[1:])]))
    return torch.cat(parts).movedim(0, layer.cut_dim)


def held(layers: Layers, spread: Spread, tied: bool, place: tuple[int, int, int]) -> list[tuple[str, Layer]]:
    """(name, layer) of what the rank at (pp, dp, tp) holds; tied: the last layer is the first one, once more, on the last stage."""
    own = [(x.name, x) for x, stage in zip(layers, spread.stages, strict=True) if stage == place[0]]
    return own + ([("again", layers[0])] if tied and place[0] == spread.pp - 1 else [])


def parts_by_hand(layers: Layers, spread: Spread, tied: bool, place: tuple[int, int, int]) -> Parts:
    here = held(layers, spread, tied, place)
    first_too = layers[0] in [x for name, x in here if name != "again"]
    tensors = {
        name: Part(
            x.shape,
            None if x.cut_dim is None else Cut(x.cut_dim, x.shape[x.cut_dim], x.blocks),
            place[2],
            spread.tp,
            layers[0].name if name == "again" else None,
        )
        for name, x in here
    }
    trained = tuple(name for name, _ in here if not (name == "again" and first_too))
    return Parts(tensors, (trained,), place[1], spread.dp)


def state_by_hand(layers: Layers, spread: Spread, tied: bool, place: tuple[int, int, int]) -> dict[str, Any]:
    """What the rank at (pp, dp, tp) saves, if the optimizer has updated layer i i + 1 times."""
    here, parts = held(layers, spread, tied, place), parts_by_hand(layers, spread, tied, place)
    cut = {
        kind: {name: cut_by_hand(x, whole_of(layers, kind)[x.name], spread.tp, place[2]) for name, x in here}
        for kind in KINDS
    }
    (trained,) = parts.vectors
    flat = {kind: torch.cat([cut[kind][name].reshape(-1) for name in trained]) for kind in KINDS[1:]}
    total = len(flat["master"])
    chunk = -(-total // spread.dp)
    offset = min(place[1] * chunk, total)
    end = min(offset + chunk, total)
    steps, begin = [], 0
    for name in trained:
        numel = cut["model"][name].numel()
        count = 1 + layers.index(dict(here)[name])
        steps.append(count if max(begin, offset) < min(begin + numel, end) else 0)
        begin += numel
    shard = {"offset": offset, "numel": end - offset, "total": total, **{k: v[offset:end] for k, v in flat.items()}}
    return {
        "step": 10,
        "model": {name: tensor.clone() for name, tensor in cut["model"].items()},
        "optimizer": {"shards": [{**shard, "steps": steps}], "groups": [{"lr": 0.1, "betas": [0.9, 0.99]}]},
        "rng": None,
        "skipped": [5],
        "parts": parts.to_plain(),
    }


def places(spread: Spread) -> list[tuple[int, int, int]]:
    return [(p, d, t) for p in range(spread.pp) for d in range(spread.dp) for t in range(spread.tp)]


def states_by_hand(layers: Layers, spread: Spread, tied: bool = False) -> list[dict[str, Any]]:
    return [state_by_hand(layers, spread, tied, place) for place in places(spread)]


@st.composite
def layer_lists(draw: st.DrawFn) -> Layers:
    made = []
    for i in range(draw(st.integers(1, 6))):
        blocks = draw(st.sampled_from([1, 1, 2, 3]))
        shape = [draw(st.integers(1, 5)) for _ in range(draw(st.integers(1, 3)))]
        dim = draw(st.none() | st.integers(0, len(shape) - 1))
        if dim is not None:
            shape[dim] *= blocks
        made.append(Layer(f"layer.{i}", tuple(shape), dim, blocks))
    return tuple(made)


@st.composite
def spreads(draw: st.DrawFn, layers: int) -> Spread:
    """Any stage for any layer, as an interleaved schedule may have it, but none without a layer."""
    stages = draw(st.lists(st.integers(0, 2), min_size=layers, max_size=layers))
    known = sorted(set(stages))
    return Spread(draw(st.integers(1, 3)), draw(st.integers(1, 3)), tuple(known.index(stage) for stage in stages))


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


MODEL = (
    Layer("tok_embed.weight", (7, 4), 0),  # seven rows: two ranks pad one
    Layer("blocks.0.ln.weight", (4,)),
    Layer("blocks.0.qkv.weight", (12, 4), 0, blocks=3),
    Layer("blocks.1.proj.weight", (4, 8), 1),
    Layer("ln_f.weight", (4,)),
)
CUBE = Spread(2, 2, (0, 0, 1, 0, 1))
CUBE_TIED = states_by_hand(MODEL, CUBE, tied=True)


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


ONE = Spread(1, 1, (0,) * 5)


def shard(states: list[dict[str, Any]], rank: int) -> dict[str, Any]:
    found: dict[str, Any] = states[rank]["optimizer"]["shards"][0]
    return found


def bumped(tensor: Tensor) -> Tensor:
    """Another last element, by one bit."""
    other = tensor.clone()
    other.view(-1)[-1] = other.view(-1)[-1].nextafter(torch.tensor(99.0))
    return other


def part_of(states: list[dict[str, Any]], rank: int, name: str) -> dict[str, Any]:
    found: dict[str, Any] = states[rank]["parts"]["tensors"][name]
    return found


def two_copies_of(states: list[dict[str, Any]], rank: int, other: int) -> None:
    states[other] = states[rank]


def without_stage(states: list[dict[str, Any]]) -> None:
    del states[4:]


def of_seven_rows(states: list[dict[str, Any]]) -> None:
    for state in states:
        if (part := state["parts"]["tensors"].get("ln_f.weight")) is not None:
            part["shape"] = [7]


WRONG: dict[str, tuple[Callable[[list[dict[str, Any]]], object], str]] = {
    "a stage that is missing": (without_stage, "expected master blocks.0.qkv.weight on some rank, found none"),
    "a tensor part that is missing": (
        lambda s: (two_copies_of(s, 0, 1), two_copies_of(s, 2, 3)),
        "vector 0: expected a slice at offset ",
    ),
    "a tensor part that nobody says to hold": (
        lambda s: [part_of(s, r, "tok_embed.weight").update(index=0) for r in (1, 3)],
        "expected the same bytes of model tok_embed.weight on ranks 0 and 1, which differ",
    ),
    "a slice twice": (lambda s: two_copies_of(s, 0, 2), "vector 0: expected a slice at offset "),
    "a slice too short": (lambda s: shard(s, 2).update(numel=3), "vector 0: expected slices of 36 elements, found 21"),
    "a whole of another shape": (of_seven_rows, r"rank 4: ln_f.weight has shape \(4,\), not \(7,\)"),
    "a part of another shape": (
        lambda s: s[1]["model"].update({"blocks.0.ln.weight": torch.zeros(5)}),
        r"rank 1: blocks.0.ln.weight has shape \(5,\), not \(4,\)",
    ),
    "a vector of another length": (
        lambda s: s[1]["parts"]["vectors"][0].pop(),
        "rank 1: a vector has 36 elements of 3 parameters, but its parts have 20 elements of 2",
    ),
    "a replicated weight that differs in a bit": (
        lambda s: s[3]["model"].update({"blocks.0.ln.weight": bumped(s[3]["model"]["blocks.0.ln.weight"])}),
        "expected the same bytes of model blocks.0.ln.weight on ranks 0 and 3, which differ",
    ),
    "a replicated moment that differs in a bit": (
        lambda s: shard(s, 3).update(exp_avg=shard(s, 3)["exp_avg"] + 1),
        "expected the same bytes of exp_avg blocks.0.ln.weight on ranks 2 and 3, which differ",
    ),
    "a tied copy that differs in a bit": (
        lambda s: s[6]["model"].update(again=bumped(s[6]["model"]["again"])),
        "expected the same bytes of model tok_embed.weight on ranks 0 and 6, which differ",
    ),
    "a count that differs": (
        lambda s: shard(s, 1).update(steps=[9, *shard(s, 1)["steps"][1:]]),
        "rank 1: tok_embed.weight has 9 updates, but 1 on another rank",
    ),
    "a learning rate that differs": (
        lambda s: s[5]["optimizer"]["groups"][0].update(lr=0.2),
        "expected the same values on all ranks, but those of rank 5 are not rank 0's",
    ),
    "a dtype that differs": (
        lambda s: s[2]["model"].update({"blocks.0.ln.weight": s[2]["model"]["blocks.0.ln.weight"].double()}),
        r"rank 2: model blocks.0.ln.weight is \(4,\) of torch.float64, but \(4,\) of torch.float32",
    ),
    "a moment that is missing": (lambda s: shard(s, 1).pop("exp_avg"), r"shard 0 holds \['exp_avg_sq', 'master'"),
    "a description that is none": (lambda s: s[1].update(parts={"tensors": 3}), "not a description of parts"),
    "no description on one rank": (lambda s: s[1].pop("parts"), "not a description of parts"),
    "a cut of another shape": (
        lambda s: part_of(s, 0, "tok_embed.weight")["cut"].update(length=8),
        r"shape is \(7, 4\), but should be 8 along dimension 0",
    ),
    "a part beyond the last": (
        lambda s: part_of(s, 0, "tok_embed.weight").update(index=2),
        "part is 2 of 2, but should be 0 to 1",
    ),
    "a name that is no tensor's": (
        lambda s: s[0]["parts"]["vectors"][0].append("nobody"),
        "vectors are .*nobody.*but should be each of at least one",
    ),
    "other tensors than are said": (
        lambda s: s[0]["model"].pop("blocks.0.ln.weight"),
        "rank 0 holds other tensors or vectors than its parts say",
    ),
}


def changed(name: str) -> list[dict[str, Any]]:
    states = states_by_hand(MODEL, CUBE, tied=True)
    WRONG[name][0](states)
    return states


@pytest.mark.parametrize("name", WRONG)
def test_states_that_do_not_fit_together_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=WRONG[name][1]):
        relaid(changed(name), parts_by_hand(MODEL, ONE, True, (0, 0, 0)), 1)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "a slice twice" else pytest.mark.slow) for name in WRONG]
)
def test_states_that_do_not_fit_together_are_an_error_of_one_line(name: str, tmp_path: Path) -> None:
    message = WRONG[name][1]
    save_sharded(changed(name), tmp_path, 10)
    with pytest.raises(
        CheckpointError, match=f"^[^\n]*: expected states that can be cut anew, found .*{message}[^\n]*$"
    ):
        load_at_layout(tmp_path, parts_by_hand(MODEL, ONE, True, (0, 0, 0)), 0, 1)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (MODEL[:-1], "the checkpoint holds ln_f.weight, which the model has not"),
        ((*MODEL, Layer("more", (2,))), "expected master more on some rank, found none"),
        ((*MODEL[:-1], Layer("ln_f.weight", (5,))), r"the whole ln_f.weight has shape \(4,\), but should have \(5,\)"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(model: Layers, message: str, tmp_path: Path) -> None:
    save_sharded(CUBE_TIED, tmp_path, 10)
    with pytest.raises(CheckpointError, match=message):
        load_at_layout(tmp_path, parts_by_hand(model, Spread(1, 1, (0,) * len(model)), True, (0, 0, 0)), 0, 1)


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
    save_sharded(states_by_hand(MODEL, CUBE), tmp_path / "run", 10)
    written = export_safetensors(tmp_path / "run", tmp_path / "model.safetensors")
    whole = whole_of(MODEL, "model")
    assert canonical({name: written[name] for name in whole}) == canonical(whole)


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
