"""Which stage to blame for a wrong update: backward, reduce, optimizer, gather or save; and for what.

Owns the order of questions asked of one step whose parameters are beyond the oracle's bound. What the optimizer's state
shows, gradients left in p.grad and known mistakes tell the stage and the cause; none of them decides that it is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from minigpt_dist.config import TrainConfig
from minigpt_dist.verify.capture import Shot
from minigpt_dist.verify.locate_cause import Candidate, best_match, shape_of, wrong_means
from minigpt_dist.verify.locate_oracle import Names, Target, advanced, with_gradient, wrong_updates
from minigpt_dist.verify.locate_state import Coverage, State, coarse, coverage, leaves_of_kind

Answer = tuple[str, str] | None
NOT_EVERYWHERE = "every element is right on some rank, but not on all: what the owner has does not reach everyone"
NOT_ZEROED = "the gradients of the step before are still there, and this step's are added: zero_grad is missing"
ASKED = "the master copy in the state_dict of the step before is not the parameters: asking for the state changes it"
HELD_REL = 1e-5  # of a gradient accumulated in float32 over a few micro-batches, relative to the largest of the ranks'


@dataclass
class WrongStep:
    """One step of all ranks, with what it should have given.

    shots, earlier: each rank's, after and before the step. initial: at the start of the run. seen, wrong: (P,) of each rank,
    parameters and which of them are out of bounds. local: each rank's own gradient. means: the mean gradients of all
    steps, this one last. owner: (P,).
    """

    config: TrainConfig
    names: Names
    target: Target
    shots: list[Shot]
    earlier: list[Shot]
    initial: list[Shot]
    seen: list[Tensor]
    wrong: list[Tensor]
    local: list[Tensor]
    means: list[Tensor]
    owner: Tensor
    any_wrong: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.any_wrong = torch.stack(self.wrong).any(0)

    def blame(self) -> tuple[str, str]:
        """(stage, cause)."""
        questions = (self._asked, self._held, self._gathered, self._nothing_moved, self._mean, self._some_rank_right)
        for ask in (*questions, self._update, self._state):
            answer = ask()
            if answer is not None:
                return answer
        return "optimizer", self._shape()

    def _states(self) -> list[State]:
        return [shot.get("state") for shot in self.shots]

    def _coverage(self, kind: str) -> Coverage:
        whole, bound = {
            "first": (self.target.moments.first, self.target.bound_first),
            "master": (self.target.params, self.target.bound),
        }[kind]
        return coverage(self._states(), kind, whole, bound)

    def _asked(self) -> Answer:
        """Have the master copies that state_dict() showed after the last step left the parameters, which they once were?"""

        def exactly(shots: list[Shot]) -> bool | None:
            params = self.names.flatten(shots[0].get("params"))
            return coverage([s.get("state") for s in shots], "master", params, torch.zeros_like(params)).right

        if self.earlier[0].step > 0 and exactly(self.initial) and exactly(self.earlier) is False:
            return "save", ASKED
        return None

    def _held(self) -> Answer:
        """Is p.grad, when step() is called, this step's gradient: the rank's own, the mean, or the sum? (It may be gone.)"""
        if self.config.reduction == "exact":  # folded away by then
            return None
        allowed = HELD_REL * torch.stack(self.local).abs().amax(0) + 1e-30
        fine = (self.target.mean, self.target.mean * self.config.world_size)
        for shot, earlier, own in zip(self.shots, self.earlier, self.local, strict=True):
            if not shot.get("held"):
                continue
            held, before = (self.names.flatten(s.get("held")) for s in (shot, earlier))
            off = [(held - right).abs() <= allowed for right in (own, *fine)]
            if any(bool(o.all()) for o in off) or not earlier.get("held"):
                continue
            if bool(((held - own - before).abs() <= 2 * allowed + HELD_REL * held.abs()).all()):
                return "backward", NOT_ZEROED
            if bool((held == before).all()):
                return "backward", "the gradients are those of the step before (stale)"
            if self.config.micro_batches == 1 and bool(off[0].any()):
                return "backward", "a part of the gradients is not this step's: zero_grad clears only some"
        return None

    def _gathered(self) -> Answer:
        """The owners' master copies are right: what is wrong is on the way from them to the parameters."""
        found = self._coverage("master")
        if found.right:
            return "gather", self._shape() or self._elsewhere()
        if found.seen and found.fits and not bool((self.any_wrong & found.covered).any()):
            return "optimizer", f"{int(self.any_wrong.sum())} elements are in no rank's slice{self._where()}"
        return None

    def _nothing_moved(self) -> Answer:
        if not all(bool((values == self.target.before).all()) for values in self.seen):
            return None
        if all(_same(a.get("state"), b.get("state")) for a, b in zip(self.shots, self.earlier, strict=True)):
            return "gather", "step() did nothing: no parameter moved, and nothing of the optimizer's state (stale)"
        if self._coverage("first").right is not False:
            return "gather", "no parameter moved in this step: equal to the value before it (stale)"
        return None

    def _mean(self) -> Answer:
        """A known wrong way to average, put through the right update."""
        if self._coverage("first").right or coarse(self.shots[0].get("state"), "first"):
            return None
        cause = best_match(self.seen, self._wrong_means(), self.any_wrong, self.owner)
        return ("reduce", cause) if cause else None

    def _wrong_means(self) -> Iterator[Candidate]:
        c, before = self.config, self.means[-2] if len(self.means) > 1 else None
        for cause, grads, loose in wrong_means(
            self.target.shares, self.target.loose, before, self.owner, c.micro_batches
        ):
            if all(self._has_first(grad, loose, [shot]) for grad, shot in zip(grads, self.shots, strict=False)):
                updates = [with_gradient(self.target, grad, loose, c) for grad in grads]
                yield cause, [u[0] for u in updates], [u[1] for u in updates]

    def _has_first(self, grad: Tensor, loose: Tensor, shots: list[Shot]) -> bool:
        """Can the first moments be what `grad` gives, where they are to be seen?"""
        now = advanced(self.target.earlier, grad, loose + 1e-5 * grad.abs(), self.config.betas, 2.0**-24)
        found = coverage([shot.get("state") for shot in shots], "first", now.first, now.loose_first)
        return not found.seen or found.fits

    def _some_rank_right(self) -> Answer:
        if self.config.world_size > 1 and not bool(torch.stack(self.wrong).all(0).any()):
            return "gather", NOT_EVERYWHERE
        return None

    def _update(self) -> Answer:
        """A known wrong update with the right mean."""
        known, N = wrong_updates(self.target, self.means, self.config), self.config.world_size
        bound = 4 * self.target.bound + 1e-6 * self.config.lr
        tried = ((cause, [make()] * N, [bound] * N) for cause, make in known.items())
        cause = best_match(self.seen, tried, self.any_wrong, self.owner)
        return ("optimizer", cause) if cause else None

    def _state(self) -> Answer:
        """No known mistake: a first moment that is not what the mean gradient gives is the reduction's fault."""
        for kind in ("first", "second"):
            if short := coarse(self.shots[0].get("state"), kind):
                return "optimizer", f"moments are kept in {short}"
        first, second = (list(leaves_of_kind(self.shots[0].get("state"), k).values()) for k in ("first", "second"))
        if first and len(first) == len(second) and all(map(torch.equal, first, second)):
            return "optimizer", "both moments hold the same numbers: they share memory"
        if self._coverage("first").right is False:
            return "reduce", self._shape()
        return None

    def _shape(self) -> str:
        rank = next(r for r, w in enumerate(self.wrong) if bool(w.any()))
        return shape_of(self.seen[rank], self.target.params, self.wrong[rank], self.target.before, self.owner)

    def _where(self) -> str:
        at = self.any_wrong.nonzero().flatten()
        return ", at the very end: padding" if int(at[0]) >= len(self.any_wrong) - self.config.world_size else ""

    def _elsewhere(self) -> str:
        """Are the right slices there, in another order? Only words for a difference that was found bit by bit: so within rounding."""
        chunk = -(-len(self.owner) // self.config.world_size)
        pieces, wanted = self.seen[0].split(chunk), self.target.params.split(chunk)
        found = [
            [j for j, w in enumerate(wanted) if len(w) == len(p) and torch.allclose(w, p, atol=1e-6)] for p in pieces
        ]
        known = [j[0] for j in found if j]
        return f"slices are joined in the order of ranks {', '.join(map(str, known))}" if known != sorted(known) else ""


def _same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return bool(a) and a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
