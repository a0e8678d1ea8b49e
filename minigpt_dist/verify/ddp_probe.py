"""The data-parallel probe: gradients of the judge's choice through an implementation's wrapper; what is in p.grad afterwards.

Owns the rank's side. The right answer is the mean over ranks, which `adam_oracle.mean_gradient` writes out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from minigpt_dist.parallel.collectives import world
from minigpt_dist.trace import digest, tensor_bytes
from minigpt_dist.verify.contract import Implementation, resolve
from minigpt_dist.verify.linear_probe import LinearModel, weights_for
from minigpt_dist.verify.plug import begin, build_wrapper, finish
from minigpt_dist.verify.scenario import Scenario


class Buffered(nn.Module):
    """A linear layer beside buffers that the rank fills itself: a float one, a count, and one that is not saved."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("running", torch.full((3,), float(rank)))
        self.register_buffer("count", torch.tensor(rank))
        self.register_buffer("hidden", torch.full((2,), -float(rank)), persistent=False)

    def forward(self, x: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        out: Tensor = self.layer(x) + self.get_buffer("running").sum()
        return out * scale, out


def construction_body(spec: str, slots: list[str]) -> dict[str, Any]:
    """Digests of a module's buffers after it was wrapped; what its forward gives, and what the module's own gives."""
    impl = resolve(spec, tuple(slots))
    if "DistributedDataParallel" not in impl.names:
        return {"not_judged": "there is no data-parallel wrapper"}
    module = Buffered(world()[1])
    wrapper = build_wrapper(impl, module)
    buffers = {name: digest(b) for name, b in module.named_buffers()}
    shown: dict[str, Any] = {}
    for name, called in (("right", module), ("forward", wrapper)):
        try:
            shown[name] = [digest(t.detach()) for t in called(torch.ones(4, 3), scale=2.0)]
        except TypeError as error:
            shown[name] = f"TypeError: {error}"
    return {"buffers": buffers, **shown}


def _backward(impl: Implementation, wrapper: Any, model: LinearModel, weights: list[Tensor | None]) -> None:
    """One forward and backward through a wrapper, and its finish call."""
    loss = wrapper([None if w is None else w.to(p.dtype) for w, p in zip(weights, model.params, strict=True)])
    loss.backward()
    finish(impl, wrapper)


def ddp_body(spec: str, slots: list[str], scenario: dict[str, Any]) -> dict[str, Any]:
    """Parameters after construction over differently filled models, then the gradients of each step; SGD moves the parameters."""
    impl = resolve(spec, tuple(slots))
    if "DistributedDataParallel" not in impl.names:
        return {"not_judged": "there is no data-parallel wrapper"}
    s = Scenario.from_dict(scenario)
    N, rank = world()
    model = LinearModel(s, s.seed + rank)
    wrapper = build_wrapper(impl, model)
    other = build_wrapper(impl, LinearModel(s, s.seed + rank + N)) if s.twice else None
    start = [tensor_bytes(p) for p in model.params]
    gradients = []
    for step in range(1, s.steps + 1):
        for each in (wrapper, other) if other is not None else (wrapper,):
            begin(impl, each)
        model.zero_grad()
        if other is not None:
            _backward(impl, other, model, weights_for(s, step + 1, rank, 0, N))
        for part in range(s.backwards):
            _backward(impl, wrapper, model, weights_for(s, step, rank, part, N))
        gradients.append([None if p.grad is None else tensor_bytes(p.grad.to(p.dtype)) for p in model.params])
        with torch.no_grad():
            for p in model.params:
                if p.grad is not None:
                    p.sub_(p.grad * 0.125)
    return {"start": start, "gradients": gradients, "end": [tensor_bytes(p) for p in model.params]}
