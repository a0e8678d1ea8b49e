"""States that are not one checkpoint, or not of the model, are refused where they would be cut anew."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from layouts_by_hand import CUBE, CUBE_TIED, MODEL, ONE, Layer, Layers, Spread, parts_by_hand, shard, states_by_hand
from torch import Tensor

from minigpt_dist.checkpoint import CheckpointError, load_at_layout, save_sharded
from minigpt_dist.checkpoint.relayout import relaid


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
    "one side of each cut that is missing": (
        lambda s: s.__setitem__(slice(None), s[::2]),
        "expected all 28 elements of model tok_embed.weight, found 16",
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
