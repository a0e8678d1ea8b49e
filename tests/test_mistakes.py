"""A wrong trajectory is traced to the known mistake that made it, or read by its shape; a broken run, to the call it broke in."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from minigpt_dist.launch import DeadlineExceeded, RankDied, RankError
from minigpt_dist.verify.adam_oracle import trajectory
from minigpt_dist.verify.blame import stage_of
from minigpt_dist.verify.extra_bytes import hint_of
from minigpt_dist.verify.flat_scenario import MOST, layout
from minigpt_dist.verify.gradient_hint import explain_gradient
from minigpt_dist.verify.gradients import rank_gradient
from minigpt_dist.verify.known_mistakes import CLIP, LOAD, OPTIMIZER, REDUCE, REST
from minigpt_dist.verify.mistakes import Values, explain
from minigpt_dist.verify.scenario import BY_NAME, SCENARIOS, Scenario
from minigpt_dist.verify.wrong_adam import RIGHT, Mistake, Simulation

VISIBLE = 4e-6  # what the judge calls wrong
SHOWS = {  # where a mistake that `plain` does not show is looked for; `plain` for the rest
    "backward before the step": "backwards",
    "over backwards": "backwards",
    "next backward": "backwards",
    "edits of weight decay": "decay_edit",
    "eight decay": "weight_decay",
    "learning rate": "lr_edit",
    "parameter groups": "groups_lr",
    "betas given": "betas",
    "eps given": "large_eps",
    "second moment so far": "betas",
    "last element": "remainder_one",
}


def unflatten(s: Scenario, flat: Tensor) -> list[Tensor]:
    """Tensors of a scenario without frozen ones, from one vector."""
    parts = flat.split([math.prod(shape) for shape in s.shapes])
    return [part.reshape(shape).float() for part, shape in zip(parts, s.shapes, strict=True)]


def shown(mistake: Mistake, s: Scenario, world_size: int, since: int = 1) -> list[Values]:
    """What every rank would show, [rank][step][tensor]."""
    seen = []
    for rank in range(world_size):
        run = Simulation(mistake, layout(s, world_size), rank, since)
        flat = [run.state.p.clone(), *(run.advance().clone() for _ in range(s.steps))]
        seen.append([unflatten(s, values) for values in flat])
    return seen


def first_wrong(s: Scenario, seen: list[Values]) -> int | None:
    """The first step at which the judge sees a difference."""
    right = trajectory(s, len(seen))
    for step in range(s.steps + 1):
        pairs = [(a, b) for rank in seen for a, b in zip(rank[step], right[step], strict=True) if a.numel()]
        if not all(bool(((a.double() - b).abs() <= VISIBLE).all()) for a, b in pairs):
            return step
    return None


def scenario_for(mistake: Mistake) -> Scenario:
    if mistake in CLIP:
        return BY_NAME["clip_idle" if "scaled to the limit" in mistake.hint else "clip"]
    if mistake in LOAD:
        return BY_NAME["reload_lr" if "constructor" in mistake.hint else "reload"]
    return next((BY_NAME[name] for words, name in SHOWS.items() if words in mistake.hint), BY_NAME["plain"])


SMALL = [s for s in SCENARIOS if sum(math.prod(shape) for shape in s.shapes) <= MOST and not s.frozen and not s.mixed]


@pytest.mark.parametrize("s", SMALL, ids=lambda s: s.name)
def test_without_a_mistake_the_simulation_is_the_oracle(s: Scenario) -> None:
    at, right = layout(s, 3), trajectory(s, 3)
    run = Simulation(RIGHT, at, 0)
    for step in range(1, s.steps + 1):
        torch.testing.assert_close(run.advance(), at.flatten(right[step]), rtol=0, atol=1e-12)


@pytest.mark.parametrize("mistake", [*REDUCE, *OPTIMIZER, *REST, *CLIP, *LOAD], ids=lambda m: m.hint[:50])
def test_a_known_mistake_is_named_with_its_stage(mistake: Mistake) -> None:
    s = scenario_for(mistake)
    seen = shown(mistake, s, 3)
    step = first_wrong(s, seen)
    assert step is not None
    assert explain(s, 3, seen, step) == (mistake.stage, mistake.hint)


def test_a_message_lost_at_one_step_is_named_although_the_steps_before_were_right() -> None:
    s, lost = BY_NAME["long"], next(m for m in REDUCE if "the share of rank 1" in m.hint)
    assert explain(s, 3, shown(lost, s, 3, since=7), 7) == ("reduce", lost.hint)


def test_a_mistake_in_some_tensors_only_is_named_with_them() -> None:
    s, own = BY_NAME["plain"], next(m for m in REDUCE if "owns it" in m.hint)
    seen, wrong = shown(RIGHT, s, 2), shown(own, s, 2)
    mixed = [
        [[b[0], *a[1:]] for a, b in zip(mine, theirs, strict=True)] for mine, theirs in zip(seen, wrong, strict=True)
    ]
    stage, hint = explain(s, 2, mixed, 1)
    assert (stage, hint.startswith("in a part of p0")) == ("reduce", True)


def reshaped(s: Scenario, world_size: int, change: object) -> list[Values]:
    """The right trajectory with the parameters of step 1 and later changed: change(rank, before, after) on flat vectors."""
    right = trajectory(s, world_size)
    seen = []
    for rank in range(world_size):
        flat = [layout(s, world_size).flatten(values) for values in right]
        after = [change(rank, flat[0], values) for values in flat[1:]]  # type: ignore[operator]  # a function of three
        seen.append([unflatten(s, values) for values in (flat[0], *after)])
    return seen


def own_slice_only(rank: int, before: Tensor, after: Tensor) -> Tensor:
    return torch.where(layout(BY_NAME["plain"], 3).owner == rank, after, before)


SHAPES = {
    "nothing is gathered": ("gather", "nothing is gathered", own_slice_only),
    "slices reversed": ("gather", "another order", lambda r, a, b: torch.cat([b[34:], b[17:34], b[:17]])),
    "one element behind": ("gather", "1 elements behind", lambda r, a, b: b.roll(1)),
    "nothing moves": ("gather", "nothing moves", lambda r, a, b: a),
    "a tensor stands still": ("optimizer", "p0 did not move", lambda r, a, b: torch.cat([a[:35], b[35:]])),
    "a slice stands still": ("gather", "slice of rank 2", lambda r, a, b: torch.cat([b[:34], a[34:]])),
    "updates too large": ("optimizer", "1.5 times", lambda r, a, b: a + 1.5 * (b - a)),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_what_fits_no_known_mistake_is_read_by_its_shape(shape: str) -> None:
    stage, words, change = SHAPES[shape]
    s = replace(BY_NAME["plain"], steps=1)
    seen_stage, hint = explain(s, 3, reshaped(s, 3, change), 1)
    assert (seen_stage, words in hint) == (stage, True), hint


def test_what_a_scenario_adds_is_to_blame_where_nothing_else_is_known() -> None:
    for name, stage, step in (("reload", "load", 3), ("snapshots", "save", 2), ("clip", "clip", 1)):
        s = BY_NAME[name]
        noise = torch.linspace(0.5, 0.7, layout(s, 2).numel, dtype=torch.float64)
        right = [layout(s, 2).flatten(values) for values in trajectory(s, 2)]
        flat = [values if at < step else values + noise * 1e-3 for at, values in enumerate(right)]
        assert explain(s, 2, [[unflatten(s, values) for values in flat]] * 2, step)[0] == stage


def test_of_a_large_scenario_a_sample_is_looked_at() -> None:
    at = layout(BY_NAME["large"], 2)
    assert MOST <= at.numel <= 2 * MOST
    assert at.owner.unique().tolist() == [0, 1]


AVERAGED = {
    "gradients are summed over ranks but not divided by N": lambda local: local.sum(0),
    "each rank uses its own gradient: nothing is reduced": lambda local: local[1],
    "only rank 0's gradient is used": lambda local: local[0],
    "divided by N-1 instead of N": lambda local: local.sum(0) / 2,
    "right to 0.004 of its size: it travels in a narrower type": lambda local: local.mean(0) * 1.00390625,
    "": lambda local: local.mean(0) + 1,
}


@pytest.mark.parametrize("hint", AVERAGED)
def test_a_wrong_averaged_gradient_is_traced_to_the_mistake_that_made_it(hint: str) -> None:
    s = BY_NAME["plain"]
    local = torch.stack([rank_gradient(s.seed, 0, s.shapes[0], 1, rank) for rank in range(3)])
    assert explain_gradient(s, 3, 1, 1, 0, AVERAGED[hint](local)) == hint


def test_a_gradient_that_is_wrong_in_places_is_named_there() -> None:
    s = BY_NAME["plain"]
    local = torch.stack([rank_gradient(s.seed, 0, s.shapes[0], 1, rank) for rank in range(3)])
    half = torch.cat([local.mean(0)[:4], local.sum(0)[4:]])
    assert explain_gradient(s, 3, 1, 1, 0, half).startswith("in a part of it, gradients are summed")


@pytest.mark.parametrize(
    "words, held, later",
    [
        ("it is not sharded", [1_200_000, 1_200_000], 0),
        ("lopsided", [1_100_000, 200_000], 0),
        ("1.5 times its share", [900_000, 900_000], 0),
        ("grows with the steps: 1400000 bytes later", [900_000, 900_000], 1_400_000),
    ],
)
def test_extra_memory_is_told_by_its_shape(words: str, held: list[int], later: int) -> None:
    assert words in hint_of(held, 100_000, 600_000, later)


BROKEN = {
    "load": RankError(1, "KeyError", "'master'", "File 'x.py', line 1, in load_state_dict\n"),
    "save": DeadlineExceeded("", [(0, "all_gather", "x.py:1")], [1], {0: "File 'x.py', line 1 in state_dict"}),
    "gather": DeadlineExceeded("", [(0, "all_gather", "x.py:1"), (1, "all_reduce", "x.py:2")], [], {}),
    "reduce": RankDied(0, -6, ["its last collective: all_reduce float32[3] on ranks [0, 1] at x.py:1: in the call"]),
    "launch": DeadlineExceeded("", [(0, "new_group", "x.py:1"), (1, "all_reduce", "x.py:2")], [], {}),
    "optimizer": RankError(0, "ValueError", "no", "File 'x.py', line 1, in step\n"),
}


@pytest.mark.parametrize("stage", BROKEN)
def test_a_broken_run_is_blamed_on_the_call_it_broke_in(stage: str) -> None:
    assert stage_of(BROKEN[stage], "optimizer") == stage
