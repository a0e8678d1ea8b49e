"""The guard: has this step gone wrong on any rank? All ranks give one answer, and go back together.

Owns the decision and the count of rollbacks. Leaves what is restored, and from where, to its caller.

The question costs no wait of its own: it is sent off after backward, travels beside the optimizer's exchange, and is answered after the
update, which a rollback undoes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from minigpt_dist.parallel.collectives import Group, Work, all_reduce_start, world

POLICIES = ("replay", "skip")


class TrainingStopped(RuntimeError):  # noqa: N818  # says what happened; the report is in the message
    """The guard has rolled back as often as it may. `incidents` lists what was wrong each time."""

    def __init__(self, incidents: list[Incident]) -> None:
        told = "\n".join(f"  {incident}" for incident in incidents)
        super().__init__(
            f"training stopped after {len(incidents)} bad steps, of which {len(incidents) - 1} were rolled back:\n{told}"
        )
        self.incidents = incidents


@dataclass(frozen=True)
class Incident:
    """A bad step: `what` is "not finite" or "spike", `ranks` how many saw something not finite, `loss` the mean over ranks."""

    step: int
    what: str
    loss: float
    before: float
    ranks: int

    def __str__(self) -> str:
        seen = f"loss or gradient not finite on {self.ranks} rank(s)" if self.what == "not finite" else "loss jumped"
        return f"step {self.step}: {seen}; mean loss {self.loss:.6g}, the step before {self.before:.6g}"


@dataclass
class Guard:
    """Watches the loss and the gradients of all ranks of `group`.

    spike: a mean loss above `spike` times the last good one is bad. limit: rollbacks allowed in the whole run.
    policy: what the caller does with the batch of a bad step: "replay" it, or "skip" it.
    """

    spike: float = 2.0
    limit: int = 3
    policy: str = "replay"
    group: Group = None
    last: float = math.nan
    incidents: list[Incident] = field(default_factory=list)
    # Made once: what a step allocates and holds would count as memory of that step.
    _numbers: Tensor = field(default_factory=lambda: torch.zeros(2, dtype=torch.float64), repr=False)
    _asked: bool = False
    _work: Work | None = None

    def __post_init__(self) -> None:
        if not (self.spike > 1.0 and math.isfinite(self.spike)):
            raise ValueError(f"spike is {self.spike!r}, but should be a finite number above 1")
        if type(self.limit) is not int or self.limit < 0:
            raise ValueError(f"limit is {self.limit!r}, but should be a whole number of at least 0")
        if self.policy not in POLICIES:
            raise ValueError(f"policy is {self.policy!r}, but should be one of {', '.join(POLICIES)}")

    def ask(self, loss: float, gradients: Iterable[Tensor]) -> None:
        """After backward, on every rank: send off this rank's mean loss and whether all its numbers are finite."""
        finite = math.isfinite(loss) and _all_finite(list(gradients))
        self._numbers[0], self._numbers[1] = loss if math.isfinite(loss) else 0.0, float(not finite)
        self._work, self._asked = all_reduce_start(self._numbers, self.group), True

    def answer(self, step: int) -> Incident | None:
        """After the update, on every rank: None for a good step, else what was wrong. TrainingStopped beyond the limit."""
        if not self._asked:
            raise ValueError("answer was called, but should be called after ask")
        if self._work is not None:
            self._work.wait()
        total, bad = self._numbers.tolist()
        self._work, self._asked = None, False
        mean = total / world(self.group)[0] if not bad else math.nan
        incident = self._judged(step, mean, int(bad))
        if incident is None:
            self.last = mean
            return None
        self.incidents.append(incident)
        if len(self.incidents) > self.limit:
            raise TrainingStopped(self.incidents)
        return incident

    def _judged(self, step: int, mean: float, bad: int) -> Incident | None:
        if bad:
            return Incident(step, "not finite", mean, self.last, bad)
        if mean > self.spike * self.last:  # false while there is no last
            return Incident(step, "spike", mean, self.last, 0)
        return None


def should_roll_back(loss: float, gradients: Iterable[Tensor], last: float, spike: float = 2.0) -> bool:
    """One answer for all ranks, which all ask together: is the loss or a gradient of any rank not finite, or the mean loss above
    `spike` times `last`, the mean loss of the last good step (NaN: there was none)? Keeps nothing from call to call."""
    guard = Guard(spike=spike, limit=1, last=last)
    guard.ask(loss, gradients)
    return guard.answer(0) is not None


def _all_finite(tensors: list[Tensor]) -> bool:
    """Is every element finite? A sum that is finite says so in one look; one that is not may have overflowed."""
    if not tensors or math.isfinite(torch.stack([t.sum() for t in tensors]).sum()):
        return True
    return all(bool(torch.isfinite(t).all()) for t in tensors)
