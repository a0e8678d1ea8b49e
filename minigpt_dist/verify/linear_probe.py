"""The linear probe: puts gradients of the judge's choice through an implementation's optimizer and returns what became of the parameters.

The loss is the sum of p * w over all elements, so that backward leaves exactly w in p.grad, through whatever hooks an implementation
has. Owns the rank's side; the right answer is `adam_oracle.py`'s, in the parent.
"""

from __future__ import annotations

import ctypes
import gc
from typing import Any

import torch
from torch import Tensor, nn

from minigpt_dist.launch import ledger
from minigpt_dist.memory import baseline, census
from minigpt_dist.parallel.collectives import barrier, world
from minigpt_dist.trace import tensor_bytes
from minigpt_dist.verify.contract import Implementation, resolve
from minigpt_dist.verify.gradients import initial_value, rank_gradient
from minigpt_dist.verify.hidden_memory import hidden_bytes, hidden_objects
from minigpt_dist.verify.optimizers import NotSupportedError, abilities, build_optimizer, grouped, scale_decay, set_lr
from minigpt_dist.verify.plug import average_gradients
from minigpt_dist.verify.scenario import Scenario

M_MMAP_THRESHOLD = -3  # of malloc.h: blocks from this size on are the system's as soon as they are freed


class LinearModel(nn.Module):
    """Parameters p0, p1, ... of a scenario; forward(weights) is the sum of p * w over those with a weight."""

    def __init__(self, s: Scenario, seed: int) -> None:
        super().__init__()
        self.params = nn.ParameterList()
        for i, shape in enumerate(s.shapes):
            value = initial_value(seed, i, shape).to(s.dtype_of(i))
            if s.transposed and len(shape) == 2:
                value = value.t().contiguous().t()
            self.params.append(nn.Parameter(value, requires_grad=i not in s.frozen))
        for i in s.tied:
            self.register_parameter(f"tied{i}", self.params[i])

    def forward(self, weights: list[Tensor | None]) -> Tensor:
        terms = [(p * w).sum() for p, w in zip(self.params, weights, strict=True) if w is not None and p.requires_grad]
        return torch.stack([t for t in terms if t.requires_grad]).sum()


def weights_for(s: Scenario, step: int, rank: int, part: int, world_size: int) -> list[Tensor | None]:
    """What backward number `part` of `rank` at `step` is to leave in each tensor's gradient; None for no gradient."""
    off = s.without_gradient(step, rank, world_size)
    weights = [
        None if i in off else rank_gradient(s.seed, i, shape, step, rank, part) for i, shape in enumerate(s.shapes)
    ]
    if s.nan_at == step and rank == world_size - 1 and weights[0] is not None:
        weights[0].view(-1)[0] = torch.nan
    return weights


def _snapshot(model: LinearModel, s: Scenario) -> list[bytes]:
    """The parameters, in the scenario's dtypes, as bytes: a tensor kept here would be counted as the implementation's."""
    return [tensor_bytes(p.to(s.dtype_of(i))) for i, p in enumerate(model.params)]


class _Run:
    """One scenario on one rank."""

    def __init__(self, impl: Implementation, s: Scenario) -> None:
        self.impl, self.s = impl, s
        self.N, self.rank = world()
        self.model = LinearModel(s, s.seed)
        self.known = baseline() if s.census else []  # looking at every object costs more than all else here
        self.hidden = hidden_objects() if s.census else []
        self.optimizer = self._build(self.model)
        self.other = self._second() if s.twice else None
        self.evaluations = 0

    def _build(self, model: LinearModel) -> Any:
        if self.s.late:
            first = [{"params": list(model.params)[:-1]}]
            return build_optimizer(self.impl, first, self.N, self.rank, self.s)
        return build_optimizer(self.impl, grouped(model, self.s), self.N, self.rank, self.s)

    def _second(self) -> tuple[LinearModel, Any]:
        model = LinearModel(self.s, self.s.seed + 1)
        return model, self._build(model)

    def trajectory(self) -> dict[str, Any]:
        """Parameters before training and after each step, what step(closure) returned, bytes held at the end."""
        s, model = self.s, self.model
        values, returned = [_snapshot(model, s)], []
        for step in range(1, s.steps + 1):
            for at, factor in s.lr_at:
                if at == step:
                    set_lr(self.optimizer, factor)
            for at, factor in s.decay_at:
                if at == step:
                    scale_decay(self.optimizer, factor)
            if s.late and step == 2:
                self.optimizer.add_param_group(
                    {"params": [model.params[-1]], **s.own_options().get(len(s.shapes) - 1, {})}
                )
            returned.append(self._step(model, self.optimizer, step))
            values.append(_snapshot(model, s))
            if self.other:
                self._step(*self.other, step)
            if s.snapshots:
                self.optimizer.state_dict()
            if step == s.reload_at:
                state = self.optimizer.state_dict()
                self.optimizer = self._build(model)
                for _ in range(s.loads):
                    self.optimizer.load_state_dict(state)
        held = self._held([b for snapshot in values for b in snapshot]) if s.census else {}
        return {
            "values": values,
            "dtypes": [str(p.dtype).removeprefix("torch.") for p in model.params],
            "returned": returned,
            "bytes": held,
            "averages_outside": self.impl.averages_outside,
            "evaluations": self.evaluations,
        }

    def _held(self, own: list[bytes]) -> dict[str, int]:
        """Bytes by kind, of two looks the least: what a collective's thread has not let go of at the first is no state."""
        first = self._look(own)
        barrier()
        return {kind: min(held, first[kind]) for kind, held in self._look(own).items()}

    def _look(self, own: list[bytes]) -> dict[str, int]:
        """Bytes by kind now; what the optimizer keeps in no tensor is its own too. `own` is what this run keeps."""
        counts = census(self.model, self.known)
        counts["optimizer"] += hidden_bytes([*self.hidden, *own], self.model)
        return counts

    def _drop_leftovers(self, model: LinearModel) -> None:
        for p in model.params if self.impl.averages_outside and not self.s.zeroing else ():
            if p.grad is not None and bool(p.grad.any()):
                p.grad = None

    def _step(self, model: LinearModel, optimizer: Any, step: int) -> float | None:
        if step not in self.s.keep_grads_before:
            if self.s.model_zero_grad:
                model.zero_grad()
            else:
                optimizer.zero_grad()
                self._drop_leftovers(model)

        def run() -> float:
            total = 0.0
            for part in range(self.s.backwards):
                weights = weights_for(self.s, step, self.rank, part, self.N)
                if all(w is None for w in weights):
                    continue
                loss = model([None if w is None else w.to(p.dtype) for w, p in zip(weights, model.params, strict=True)])
                loss.backward()
                total += loss.item()
            return total

        def averaged() -> float:
            total = run()
            if self.impl.averages_outside:
                average_gradients(model.params)
            self.evaluations += 1
            return total

        if self.s.closure:
            result = optimizer.step(averaged)
            return None if result is None else float(result)
        averaged()
        optimizer.step()
        return None


_kept: list[_Run] = []


def hold_body(spec: str, slots: list[str], scenario: dict[str, Any] | None) -> dict[str, Any]:
    """Run one scenario, unobserved, and keep model and optimizer until the next call; for None keep nothing.

    Freed memory is given back to the system, whichever thread frees it, so that what the process holds can be told from outside.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # of glibc
        libc.mallopt(M_MMAP_THRESHOLD, 1 << 18)
    _kept.clear()
    try:
        if scenario is not None:
            run = _Run(resolve(spec, tuple(slots)), Scenario.from_dict(scenario))
            for step in range(1, run.s.steps + 1):
                run._step(run.model, run.optimizer, step)
            _kept.append(run)
    except NotSupportedError as error:
        return {"not_judged": str(error)}
    ledger.clear()  # it holds the work of the last calls
    gc.collect()
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
    return {}


def probe_body(spec: str, slots: list[str], scenario: dict[str, Any]) -> dict[str, Any]:
    """Run one scenario on this rank: its trajectory, or why it cannot be put to this implementation."""
    impl = resolve(spec, tuple(slots))
    s = Scenario.from_dict(scenario)
    try:
        _require(impl, s)
        run = _Run(impl, s)
        _require(impl, s)  # now that it is known what a function makes
        return run.trajectory()
    except NotSupportedError as error:
        return {"not_judged": str(error)}


def _require(impl: Implementation, s: Scenario) -> None:
    """NotSupportedError for a scenario that needs what the implementation lacks."""
    missing = sorted(s.needs() - abilities(impl))
    if missing:
        raise NotSupportedError(f"no way to set {', '.join(missing)}")
