"""The sharded probe: a stack of small modules trained by an implementation's ZeRO stage 2 or 3; what became of it, and the bytes it held.

Owns the rank's side: the model, whose modules are the units that stage 3 gathers, its data, and when bytes are counted. Data and first
weights are drawn alike in the parent, where `checks/sharded.py` knows the right answer.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from minigpt_dist.memory import baseline, census
from minigpt_dist.parallel.collectives import world
from minigpt_dist.trace import tensor_bytes
from minigpt_dist.verify.contract import Implementation, resolve
from minigpt_dist.verify.keywords import accepted

NAMES = {"zero2": "Zero2Optimizer", "zero3": "Zero3Optimizer"}
ADAM: dict[str, Any] = {"lr": 0.25, "betas": (0.5, 0.75), "eps": 1.0, "weight_decay": 0.125}
# With an eps of gradients' size, an update is a smooth function of them: float32's rounding is not magnified, and a factor is seen.


class Unit(nn.Module):
    """x + tanh(x W^T + b) / 2. `watch`, if set, is called in forward, and in backward before the gradient reaches the unit's input."""

    def __init__(self, width: int, draw: torch.Generator) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width, generator=draw) / width**0.5)
        self.bias = nn.Parameter(torch.randn(width, generator=draw))
        self.watch: Callable[[str], None] = lambda _: None

    def forward(self, x: Tensor) -> Tensor:
        self.watch("forward")
        if x.requires_grad:
            x.register_hook(lambda _: self.watch("backward"))
        return x + torch.tanh(F.linear(x, self.weight, self.bias)) / 2


class Stack(nn.Module):
    """Units one after the other, and a head; tied: its weight is the first unit's. frozen: the second unit's bias is not trained."""

    def __init__(self, case: dict[str, Any]) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(case["seed"])
        self.units = nn.ModuleList(Unit(case["width"], draw) for _ in range(case["units"]))
        self.head = nn.Linear(case["width"], case["width"], bias=False)
        self.head.weight = nn.Parameter(
            torch.randn(case["width"], case["width"], generator=draw) / case["width"] ** 0.5
        )
        if case["tied"]:
            self.head.weight = self.units[0].weight  # type: ignore[assignment]  # a parameter of a module that is known
            self.units[1].bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for unit in self.units:
            x = unit(x)
        out: Tensor = self.head(x)
        return out


def loss_of(model: nn.Module, case: dict[str, Any], step: int, rank: int, part: int) -> Tensor:
    """Of the rank's own data in micro-batch `part` of a step: a mean of products, and so of gradients about 1."""
    draw = torch.Generator().manual_seed(case["seed"] + 1000 * step + 100 * part + rank + 1)
    x, up = (torch.randn(4, case["width"], generator=draw).to(next(model.parameters()).dtype) for _ in range(2))
    loss: Tensor = (model(x) * up).sum() / 2
    return loss


def sharded_body(spec: str, slots: list[str], slot: str, case: dict[str, Any]) -> dict[str, Any]:
    """After each step the parameters, one after the other in one vector, and the sum of its losses; and what was counted, if asked."""
    found, (N, rank) = resolve(spec, tuple(slots)), world()
    if not found.offers(slot):
        return {"not_judged": f"it hands in no {slot}: --slots {slot} asks for it"}
    build = found.require(NAMES[slot])
    options = accepted(build, {"bucket_mb": case["bucket_mb"]}) if case["bucket_mb"] else {}
    if case["bucket_mb"] and not options:
        return {"not_judged": f"{NAMES[slot]} takes no bucket_mb"}
    run = _Run(found, slot, case, N, rank, options)
    for step in range(1, case["steps"] + 1):
        run.step(step)
    return {"values": run.values, "losses": run.losses, "counts": run.counts}


class _Run:
    """One case on one rank."""

    def __init__(
        self, found: Implementation, slot: str, case: dict[str, Any], N: int, rank: int, options: dict[str, Any]
    ) -> None:
        self.case, self.rank = case, rank
        self.known = baseline() if case["count"] else []
        self.model = Stack(case)
        self.optimizer = found.require(NAMES[slot])(self.model, N, rank, **ADAM, **options)
        self.values: list[bytes] = []
        self.losses: list[float] = []
        self.counts: dict[str, int] = {}

    def step(self, step: int) -> None:
        """Backwards and an update; with `discard`, gradients of other data are made and forgotten first, and a forward alone is run."""
        case = self.case
        if case["discard"]:
            loss_of(self.model, case, step + 50, self.rank, 0).backward()
            with torch.no_grad():
                loss_of(self.model, case, step + 50, self.rank, 1)
        self.optimizer.zero_grad()
        self._count("at rest")
        self._watch(case["count"])
        total = 0.0
        for part in range(case["parts"]):
            loss = loss_of(self.model, case, step, self.rank, part)
            loss.backward()
            total += loss.item()
        self.losses.append(total)
        self._watch(False)
        self._count("after backward")
        if case["forward_alone"]:
            with torch.no_grad():
                loss_of(self.model, case, step, self.rank, 0)
        self.optimizer.step()
        with getattr(self.optimizer, "gathered", nullcontext)():
            self.values.append(tensor_bytes(torch.cat([p.detach().flatten() for p in self.model.parameters()])))
        self._count("after the step")

    def _watch(self, on: bool) -> None:
        """Count in the last unit's forward, when all others have run, and in the second's backward, when all others have had theirs."""
        wanted = {"forward": len(self.model.units) - 1, "backward": 1}
        for i, unit in enumerate(self.model.units):
            here = {way for way, at in wanted.items() if on and at == i}
            unit.watch = partial(self._counted_in, here)  # type: ignore[assignment]  # a plain attribute

    def _counted_in(self, here: set[str], way: str) -> None:
        if way in here:
            self._count(f"in {way}")

    def _count(self, when: str) -> None:
        if self.case["count"]:
            found = census(self.model, self.known)
            self.counts[when] = found["params"] + found["grads"] + found["optimizer"]
