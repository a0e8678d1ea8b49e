"""The updates of a run, each held on its own against what its own gradients give.

Owns the verdict on a step: parameters within the oracle's bound, the same bits on every rank, first moments that hold the
mean. Leaves the blame to `locate_blame.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from minigpt_dist.verify.capture import Shot
from minigpt_dist.verify.difference import Difference, bits_differ, difference
from minigpt_dist.verify.locate_blame import WrongStep
from minigpt_dist.verify.locate_oracle import Names, Target, Teacher, even_owner
from minigpt_dist.verify.locate_run import Run
from minigpt_dist.verify.locate_state import coarse, leaves_of_kind, start_of

ONLY_BITS = "right within rounding, but not the same on every rank: what the owner has does not reach everyone"


class Steps:
    """The updates of one run. `dtype`: whose rounding is allowed (default: the run's). ValueError if the oracle has none for it."""

    def __init__(self, run: Run, dtype: str | None = None) -> None:
        self.run, self.start = run, run.steps[0]
        first = run.shots[self.start + 1, 0].get("grads") if (self.start + 1, 0) in run.shots else {}
        self.names = Names({n: t for n, t in run.shots[self.start, 0].get("params").items() if n in first})
        self.owner = even_owner(self.names.numel, run.config.world_size)
        self.teacher = Teacher(run.config, self.names.numel, dtype)
        self.means: list[Tensor] = []

    def wrong_updates(self, until: int) -> Iterator[tuple[int, Difference]]:
        """(step, difference) for each step up to `until` that is not what its gradients give."""
        for step in range(self.start + 1, until + 1):
            found = self._judge(step)
            if found is not None:
                yield step, found

    def _at(self, step: int) -> list[Shot]:
        return [self.run.shots[step, rank] for rank in self.run.ranks]

    def _judge(self, step: int) -> Difference | None:
        c, shots, earlier = self.run.config, self._at(step), self._at(step - 1)
        undivided = c.micro_batches if c.reduction == "exact" else 1
        local = [self.names.flatten(shot.get("grads")) / undivided for shot in shots]
        target = self.teacher.expect(local, self.names.flatten(earlier[0].get("params")))
        self.means.append(target.mean)
        seen = [self.names.flatten(shot.get("params")) for shot in shots]
        wrong = [~((values - target.params).abs() <= target.bound) for values in seen]
        if not any(bool(w.any()) for w in wrong):
            return self._replicas(shots) or self._first_moments(shots, target)
        step_ = WrongStep(
            c, self.names, target, shots, earlier, self._at(self.start), seen, wrong, local, self.means, self.owner
        )
        stage, cause = step_.blame()
        rank = next(r for r, w in enumerate(wrong) if bool(w.any()))
        return self._difference(shots[rank], target.params, wrong[rank], stage, cause)

    def _difference(self, shot: Shot, wanted: Tensor, wrong: Tensor, stage: str, cause: str) -> Difference:
        name, _ = self.names.place(int(wrong.nonzero()[0]))
        start, seen = self.names.starts[name], shot.get("params")[name]
        part = slice(start, start + seen.numel())
        right = wanted[part].to(seen.dtype).view_as(seen)
        return difference(shot.step, shot.rank, stage, name, seen, right, wrong[part].view_as(seen)).because(cause)

    def _replicas(self, shots: list[Shot]) -> Difference | None:
        """All are right within rounding: then they must be the same on every rank, bit for bit."""
        first = shots[0].get("params")
        for shot in shots[1:]:
            for name, seen in shot.get("params").items():
                wrong = bits_differ(seen, first[name])
                if wrong is None or bool(wrong.any()):
                    found = difference(shot.step, shot.rank, "gather", name, seen, first[name], wrong)
                    return found.because(ONLY_BITS)
        return None

    def _first_moments(self, shots: list[Shot], target: Target) -> Difference | None:
        """The parameters are right: is a first moment evidently that of its elements, and yet not what the mean gradient gives?

        Adam hides errors of a gradient far above eps from the parameters; the moment shows them.
        """
        whole, bound = target.moments.first, target.bound_first
        for shot in shots:
            if coarse(shot.get("state"), "first"):
                continue  # shown in a shorter type than it is kept in: else the parameters would not be right
            for name, leaf in leaves_of_kind(shot.get("state"), "first").items():
                if not bool(leaf.any()) or start_of(leaf, whole, bound) is not None:
                    continue
                start = start_of(leaf, whole, torch.maximum(whole.abs() * 2.0**-6, bound))
                if start is not None:
                    part = slice(start, start + len(leaf))
                    seen = shot.get("state")[name].flatten()[: len(whole[part])]
                    right = whole[part].to(seen.dtype)
                    off = (seen.double() - whole[part]).abs() > bound[part]
                    found = difference(shot.step, shot.rank, "reduce", name, seen, right, off)
                    return found.because("the gradient in the first moment is off from the mean by more than rounding")
        return None
