"""The search for a known mistake that explains a wrong trajectory, which gives a violation its stage and its hint.

What fits none of `known_mistakes/` is read by its shape (`symptoms.py`). A diagnosis only: no verdict depends on it, so it runs only
once something is known to be wrong.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from minigpt_dist.verify import symptoms
from minigpt_dist.verify.flat_scenario import Flat, Layout, layout
from minigpt_dist.verify.known_mistakes import CONDITIONS, FACTORS, LOAD, OPTIMIZER, REDUCE, REST
from minigpt_dist.verify.scenario import Scenario
from minigpt_dist.verify.wrong_adam import Mistake, Simulation, close, fits, steps_fitting

SEARCH = 200  # elements of the largest scenario in which every distance is tried for a shifted gradient
Values = list[list[Tensor]]


def _candidates(s: Scenario, step: int) -> Iterator[tuple[Mistake, int]]:
    """(mistake, first step that it spoils), the likelier first. What a reload loses cannot show before it."""
    if s.reload_at and step == s.reload_at + 1:
        yield from ((m, 1) for m in LOAD)
    for condition, mistakes in CONDITIONS.items():
        if getattr(s, condition):
            yield from ((m, 1) for m in mistakes)
    for m in (*REDUCE, *OPTIMIZER, *REST, *FACTORS):
        yield m, 1
    if step > 1:
        yield from ((m, step) for m in REDUCE)


def explain(s: Scenario, world_size: int, seen: list[Values], step: int) -> tuple[str, str]:
    """(stage, hint) for a trajectory that is wrong from `step` on: the known mistake that reproduces most of it, or what can be told.

    `seen[rank][step]` are the tensors of the scenario, before training and after each step.
    """
    if step == 0:
        return "broadcast", "parameters changed before the first step"
    at = layout(s, world_size)
    flat = [[at.flatten(values) for values in rank] for rank in seen]
    found = symptoms.standing(at, seen, flat, step) or _known(at, flat, step) or symptoms.misplaced(at, flat, step)
    if found:
        return found
    return _in_part(at, flat, step) or symptoms.left_over(at, flat, step)


def _known(at: Layout, flat: Flat, step: int) -> tuple[str, str] | None:
    """The known mistake that reproduces all parameters for the most steps, at least up to `step`."""
    best, reach = None, step - 1
    for mistake, since in _candidates(at.scenario, step):
        fitting = steps_fitting(mistake, at, flat, since)
        if fitting > reach:
            best, reach = mistake, fitting
        if reach == len(flat[0]) - 1:
            break
    if best is not None and at.scenario.snapshots and step > 1:
        return "save", f"after the state was asked for: {best.hint}"
    return (best.stage, best.hint) if best is not None else None


def _from_elsewhere(by: int, at: Layout) -> Mistake:
    """Gradients of elements `by` further on, round the end."""
    return Mistake("reduce", f"gradients come from {by} elements further on, of {at.numel}", lambda x: x.mean.roll(-by))


def _in_part(at: Layout, flat: Flat, step: int) -> tuple[str, str] | None:
    """A known mistake that reproduces the wrong elements of this step, where the others are right."""
    now = flat[0][step]
    wrong = ~close(now, symptoms.right(at, step))
    moved = ~close(now, flat[0][step - 1])
    if bool(wrong.all()) or not bool(moved[wrong].any()) or not all(fits(values[step], now) for values in flat):
        return None
    mistakes = [m for m, _ in _candidates(at.scenario, step)] + [
        _from_elsewhere(by, at) for by in range(2, at.numel if at.numel <= SEARCH else 0)
    ]
    for mistake in mistakes:
        simulation = Simulation(mistake, at, 0, since=step)
        for _ in range(step):
            shown = simulation.advance()
        if fits(shown[wrong], now[wrong]):
            tensors = ", ".join(f"p{i}" for i in at.tensor[wrong].unique().tolist())
            # What was right up to a reload and is wrong right after it came from the load, whatever it looks like.
            stage, when = ("load", " after loading") if step == at.scenario.reload_at + 1 > 1 else (mistake.stage, "")
            return stage, f"in a part of {tensors}{when}: {mistake.hint}"
    return None
