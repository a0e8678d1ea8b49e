"""The guard probe: losses and gradients of the judge's choice, step by step; what an implementation's guard answers on this rank."""

from __future__ import annotations

from typing import Any

import torch

from minigpt_dist.parallel.collectives import world
from minigpt_dist.verify.contract import resolve


def guard_body(spec: str, slots: list[str], cases: list[dict[str, Any]]) -> dict[str, Any]:
    """The answers, one a case. A case: losses by rank, last, and the value of one element of one gradient of one rank, as text."""
    found = resolve(spec, tuple(slots))
    if not found.offers("guard"):
        return {"not_judged": "it hands in no guard: --slots guard asks for it"}
    call, (_, rank) = found.require("should_roll_back"), world()
    answers = []
    for case in cases:
        gradients = [torch.full((3, 2), 0.5), torch.full((5,), -0.25), torch.full((2,), case["size"])]
        if case["at"] == rank:
            gradients[1][3] = float(case["value"])
        losses = [float(loss) for loss in case["losses"]]
        answer = call(losses[rank % len(losses)], gradients, float(case["last"]))
        answers.append(bool(answer) if isinstance(answer, (bool, int)) else str(answer)[:80])
    return {"answers": answers}
