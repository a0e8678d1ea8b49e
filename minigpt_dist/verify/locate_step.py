"""Which stage to blame for a wrong update: backward, reduce, clip, optimizer or gather.

Owns the order of questions asked of one step, once its parameters are beyond the oracle's bound. Parameters alone give the verdict; the optimizer's own state,
gradients left in p.grad, and known mistakes only tell the stage and the cause.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from minigpt_dist.verify.capture import Shot
from minigpt_dist.verify.difference import Difference, bits_differ, difference
from minigpt_dist.verify.locate_cause import matching, shape_of, wrong_means
from minigpt_dist.verify.locate_oracle import Names, Target, Teacher, even_owner, with_gradient, wrong_updates
from minigpt_dist.verify.locate_run import Run
from minigpt_dist.verify.locate_state import all_slices, coarse, is_slice, kind_of_state, leaves_of_kind, start_of


def in_order(names: Sequence[str]) -> list[str]:
    """Names of an optimizer's state in the order in which a step writes them: first moments, second, the rest, master copies."""
    rank = {"first": 0, "second": 1, "": 2, "master": 3}
    return sorted(names, key=lambda name: rank[kind_of_state(name)])


class Steps:
    """The updates of a run, each judged on its own."""

    def __init__(self, run: Run) -> None:
        self.run, c = run, run.config
        first = run.shots[1, 0].get("grads") if (1, 0) in run.shots else {}
        self.names = Names({n: t for n, t in run.shots[run.steps[0], 0].get("params").items() if n in first})
        self.owner = even_owner(self.names.numel, c.world_size)
        self.teacher = Teacher(c, self.names.numel)
        self.means: list[Tensor] = []

    def wrong_updates(self, until: int) -> Iterator[tuple[int, Difference]]:
        """(step, difference) for each step up to `until` whose parameters are not what its gradients give."""
        for step in range(self.run.steps[0] + 1, until + 1):
            shots = [self.run.shots[step, rank] for rank in self.run.ranks]
            found = self._judge(step, shots)
            if found is not None:
                yield step, found

    def _judge(self, step: int, shots: list[Shot]) -> Difference | None:
        c = self.run.config
        undivided = c.micro_batches if c.reduction == "exact" else 1
        local = [self.names.flatten(shot.get("grads")) / undivided for shot in shots]
        before = self.names.flatten(self.run.shots[step - 1, 0].get("params"))
        target = self.teacher.expect(local, before)
        previous, self.means = (self.means[-1] if self.means else None), [*self.means, target.mean]
        seen = [self.names.flatten(shot.get("params")) for shot in shots]
        wrong = [~((values - target.params).abs() <= target.bound) for values in seen]
        if any(bool(w.any()) for w in wrong):
            stage, cause = _Blame(self, target, shots, seen, wrong, previous, local).verdict()
            rank = next(r for r, w in enumerate(wrong) if bool(w.any()))
            return self._difference(step, shots[rank], target.params, wrong[rank], stage, cause)
        return self._replicas(step, shots) or self._first_moments(step, shots, target)

    def _first_moments(self, step: int, shots: list[Shot], target: Target) -> Difference | None:
        """The parameters are right, but a first moment is evidently that of its elements and yet not as the mean gradient makes it."""
        whole, coarsely = target.moments.first, target.moments.first.abs() * 2.0**-6
        for shot in shots:
            for name, leaf in shot.get("state").items():
                if kind_of_state(name) != "first" or not leaf.is_floating_point() or not leaf.numel():
                    continue
                flat = leaf.double().flatten()
                if is_slice(flat, whole, target.bound_first) is False and (start := start_of(flat, whole, coarsely)) is not None:
                    wanted, bound = (v[start : start + len(flat)] for v in (whole, target.bound_first))
                    seen, wanted = leaf.flatten()[: len(wanted)], wanted.to(leaf.dtype)
                    found = difference(step, shot.rank, "reduce", name, seen, wanted, (seen.double() - wanted.double()).abs() > bound)
                    return found.because("the mean gradient that it holds is off by more than rounding")
        return None

    def _difference(self, step: int, shot: Shot, wanted: Tensor, wrong: Tensor, stage: str, cause: str) -> Difference:
        name, _ = self.names.place(int(wrong.nonzero()[0]))
        start, seen = self.names.starts[name], shot.get("params")[name]
        part = slice(start, start + seen.numel())
        found = difference(
            step, shot.rank, stage, name, seen, wanted[part].to(seen.dtype).view_as(seen), wrong[part].view(seen.shape)
        )
        return found.because(cause)

    def _replicas(self, step: int, shots: list[Shot]) -> Difference | None:
        """All are right within rounding: then they must be the same on every rank, bit for bit."""
        first = shots[0].get("params")
        for shot in shots[1:]:
            for name, seen in shot.get("params").items():
                wrong = bits_differ(seen, first[name])
                if wrong is None or bool(wrong.any()):
                    found = difference(step, shot.rank, "gather", name, seen, first[name], wrong)
                    return found.because(
                        "right within rounding, but not the same on every rank: what the owner has does not reach everyone"
                    )
        return None


def _same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return bool(a) and a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


class _Blame:
    """One wrong step. `seen`, `wrong`: (P,) of each rank; `previous`: the mean gradient one step before; `local`: each rank's own gradient."""

    def __init__(
        self,
        steps: Steps,
        target: Target,
        shots: list[Shot],
        seen: list[Tensor],
        wrong: list[Tensor],
        previous: Tensor | None,
        local: list[Tensor],
    ) -> None:
        self.steps, self.target, self.shots, self.seen, self.wrong, self.previous, self.local = (
            steps,
            target,
            shots,
            seen,
            wrong,
            previous,
            local,
        )
        self.c = steps.run.config
        self.any_wrong = torch.stack(wrong).any(0)

    def verdict(self) -> tuple[str, str]:
        """(stage, cause)."""
        for ask in (
            self._held,
            self._gathered,
            self._alone,
            self._some_rank_right,
            self._nothing_moved,
            self._mean,
            self._update,
            self._state,
        ):
            found = ask()
            if found is not None:
                return found
        return "optimizer", self._shape()

    def _asked(self) -> tuple[str, str] | None:
        """Had the master copies that state_dict() showed after the step before already left the parameters?"""
        exact = torch.zeros_like(self.target.before)
        for shot in self.shots:
            earlier = self.steps.run.shots[shot.step - 1, shot.rank]
            if earlier.step and all_slices(earlier.get("state"), "master", self.target.before, exact) is False:
                if all_slices(shot.get("state"), "master", self.steps.names.flatten(shot.get("params")), exact):
                    return "save", "the master copy in the state_dict of the step before is not what the parameters were: asking for it changed it"
        return None

    def _held(self) -> tuple[str, str] | None:
        """Is what lies in p.grad when step() is called this step's gradient: the rank's own, the mean, or the sum? (An implementation may leave nothing.)"""
        if self.c.reduction == "exact":  # folded away by then
            return None
        mean, allowed = self.target.mean, 1e-5 * torch.stack(self.local).abs().amax(0) + 1e-30
        for shot, own in zip(self.shots, self.local, strict=True):
            if not shot.get("held"):
                continue
            held = self.steps.names.flatten(shot.get("held"))
            if any(bool(((held - fine).abs() <= allowed).all()) for fine in (own, mean, mean * self.c.world_size)):
                continue
            earlier = self.steps.run.shots[shot.step - 1, shot.rank].get("held")
            if earlier and bool(
                ((held - own - self.steps.names.flatten(earlier)).abs() <= 2 * allowed + 1e-6 * held.abs()).all()
            ):
                return (
                    "backward",
                    "the gradients of the step before are still there, and this step's are added: zero_grad is missing",
                )
            if earlier and bool((held == self.steps.names.flatten(earlier)).all()):
                return "backward", "the gradients are those of the step before"
            if self.c.micro_batches == 1 and bool(((held - own).abs() > allowed).sum() < len(own)):
                return (
                    "backward",
                    "part of the gradients held is not this step's: zero_grad clears only some" if earlier else "",
                )
        return None

    def _gathered(self) -> tuple[str, str] | None:
        """The owners' master copies are right, so what is wrong is on the way from them to the parameters."""
        told = [all_slices(shot.get("state"), "master", self.target.params, self.target.bound) for shot in self.shots]
        if any(t is not None for t in told) and all(t is not False for t in told):
            return "gather", self._shape() or self._elsewhere()
        return None

    def _alone(self) -> tuple[str, str] | None:
        """Does each rank use its own gradient for everything?"""
        if self.c.world_size == 1:
            return None
        own = [with_gradient(self.target, g, self.target.loose + 1e-5 * g.abs(), self.c) for g in self.local]
        if all(bool(((values - wanted).abs() <= bound).all()) for values, (wanted, bound) in zip(self.seen, own, strict=True)):
            return "reduce", "each rank uses its own gradient: nothing is reduced"
        return None

    def _some_rank_right(self) -> tuple[str, str] | None:
        if self.c.world_size > 1 and not bool(torch.stack(self.wrong).all(0).any()):
            return (
                "gather",
                "every element is right on some rank, but not on all: what the owner has does not reach everyone",
            )
        return None

    def _nothing_moved(self) -> tuple[str, str] | None:
        if (
            all(bool((values == self.target.before).all()) for values in self.seen)
            and self._first_moment() is not False
        ):
            return "gather", "no parameter moved in this step: equal to the value before it (stale)"
        return None

    def _first_moment(self) -> bool | None:
        """Do the ranks' first moments hold what the mean gradient gives? None if they are not to be seen."""
        told = [all_slices(shot.get("state"), "first", self.target.moments.first, self.target.bound_first) for shot in self.shots]
        if any(t is not None for t in told):
            return all(t is not False for t in told)
        seen = any(leaves_of_kind(shot.get("state"), "first") for shot in self.shots)
        return False if seen and bool(self.target.moments.first.any()) else None  # all zeros, on every rank

    def _mean(self) -> tuple[str, str] | None:
        """A known wrong way to average, put through the right update."""
        means = wrong_means(self.target.shares, self.target.loose, self.previous, self.steps.owner, self.c.micro_batches)
        tried = ((cause, *with_gradient(self.target, grad, loose, self.c)) for cause, grad, loose in means)
        cause = matching(self.seen, tried, self.any_wrong, self.steps.owner)
        return ("reduce", cause) if cause and self._first_moment() is not True else None

    def _update(self) -> tuple[str, str] | None:
        """A known wrong update with the right mean."""
        known = wrong_updates(self.target, self.steps.means, self.c)
        tried = ((cause, make(), 4 * self.target.bound + 1e-6 * self.c.lr) for cause, make in known.items())
        cause = matching(self.seen, tried, self.any_wrong, self.steps.owner)
        return ("optimizer", cause) if cause else None

    def _state(self) -> tuple[str, str] | None:
        """No known mistake: a first moment that is not what the mean gradient gives is the reduction's fault."""
        for kind in ("first", "second"):
            short = coarse(self.shots[0].get("state"), kind)
            if short:
                return "optimizer", f"moments are kept in {short}"
        state = self.shots[0].get("state")
        pairs = list(zip(leaves_of_kind(state, "first"), leaves_of_kind(state, "second"), strict=False))
        if pairs and all(torch.equal(a, b) for a, b in pairs):
            return "optimizer", "both moments hold the same numbers: they share memory"
        if self._first_moment() is False:
            return "reduce", self._shape()
        return None

    def _shape(self) -> str:
        rank = next(r for r, w in enumerate(self.wrong) if bool(w.any()))
        return shape_of(
            self.seen[rank], self.target.params, self.wrong[rank], self.target.before, None, self.steps.owner
        )

    def _elsewhere(self) -> str:
        """Are the right slices there, in another order?"""
        N, seen = self.c.world_size, self.seen[0]
        pieces = seen.split(-(-len(seen) // N))
        wanted = self.target.params.split(-(-len(seen) // N))
        found = [
            next((j for j, w in enumerate(wanted) if len(w) == len(p) and bool((w - p).abs().max() < 1e-6)), None)
            for p in pieces
        ]
        known = [j for j in found if j is not None]
        return f"slices are joined in the order of ranks {', '.join(map(str, known))}" if known != sorted(known) else ""
