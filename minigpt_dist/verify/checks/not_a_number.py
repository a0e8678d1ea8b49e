"""Does a gradient that is not a number, on one rank only, reach the parameters of every rank, or stop the step everywhere?

Owns the rule: what is hidden on one rank trains on as if nothing had been. Leaves how a step is stopped to the implementation.
"""

from __future__ import annotations

from minigpt_dist.verify.checks.optimizer import trajectories
from minigpt_dist.verify.checks.registry import Check, register
from minigpt_dist.verify.scenario import Scenario
from minigpt_dist.verify.subject import Subject
from minigpt_dist.verify.violation import Violation

POISONED = Scenario(
    name="not_a_number", why="one element on the last rank is not a number at step 2", steps=2, nan_at=2
)


def nan_is_not_hidden(subject: Subject, world_size: int) -> list[Violation]:
    """After the step that met it, the element is not a number on every rank; or no rank has moved."""
    s = POISONED.drawn(subject.draw(POISONED.name))
    _, seen = trajectories(subject, world_size, s)
    if all(a.equal(b) for values in seen for a, b in zip(values[1], values[2], strict=True)):
        return []  # the step was skipped, by all
    for rank, values in enumerate(seen):
        element = values[2][0].flatten()[0]
        if not bool(element.isnan()):
            return [
                Violation(
                    "a parameter whose gradient is not a number on one rank",
                    f"{float(element):.6g}",
                    "not a number, on every rank, unless all ranks skip the step",
                    "reduce",
                    step=2,
                    rank=rank,
                    tensor="p0",
                    element=0,
                    hint="a NaN that one rank replaces by something else is trained on by all",
                )
            ]
    return []


register(
    Check(
        "optimizer.not_a_number",
        "a NaN on one rank is not hidden",
        nan_is_not_hidden,
        ("optimizer",),
        "reduce",
        (1, 2, 3),
        True,
    )
)
