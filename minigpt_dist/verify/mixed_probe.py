"""The mixed-precision probe: 16-bit parameters and the judge's gradients through an implementation's loss scale and master copy.

Owns the rank's side. The loss is the sum of p * w in float32, so that backward leaves w times the scale in p.grad, rounded to 16 bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from minigpt_dist.parallel.collectives import world
from minigpt_dist.trace import tensor_bytes
from minigpt_dist.verify.contract import Implementation, resolve

Case = dict[str, Any]
SHAPES = ((3, 4), (5,))


class Half(nn.Module):
    """Two parameters between 0.5 and 1.5."""

    def __init__(self, seed: int, dtype: str) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        values = [torch.rand(shape, generator=draw) + 0.5 for shape in SHAPES]
        self.params = nn.ParameterList(nn.Parameter(value.to(getattr(torch, dtype))) for value in values)

    def forward(self, weights: list[Tensor]) -> Tensor:
        return torch.stack([(p.float() * w).sum() for p, w in zip(self.params, weights, strict=True)]).sum()


def weights_of(case: Case, step: int, rank: int, world_size: int) -> list[Tensor]:
    """This rank's gradients at a step: whole numbers from -7 to 7, none of them 0, times a power of two; `bad` in one of them at times.

    bad: (step, number as text) pairs, of the last rank's first element.
    """
    draw = torch.Generator().manual_seed(case["seed"] + 100 * step + rank)
    size = 2.0 ** case["exponent"]
    numbers = [torch.randint(1, 8, shape, generator=draw) for shape in SHAPES]
    signs = [torch.randint(0, 2, shape, generator=draw) * 2 - 1 for shape in SHAPES]
    weights = [n.float() * s * size for n, s in zip(numbers, signs, strict=True)]
    for at, value in case["bad"]:
        if at == step and rank == world_size - 1:
            weights[0].view(-1)[0] = float(value)
    return weights


def mixed_body(spec: str, slots: list[str], case: Case) -> dict[str, Any]:
    """After each step: was there an update, the scale, and the parameters in float32."""
    found = resolve(spec, tuple(slots))
    if not found.offers("precision"):
        return {"not_judged": "it hands in no precision: --slots precision asks for it"}
    N, rank = world()
    model, steps = Half(case["seed"], case["dtype"]), []
    optimizer = _built(found, model, case, N, rank)
    for step in range(1, case["steps"] + 1):
        optimizer.zero_grad()
        optimizer.backward(model(weights_of(case, step, rank, N)))
        stepped = optimizer.step()
        if case["resumes"]:
            model, optimizer = _resumed(found, model, optimizer, case, N, rank)
        value = torch.cat([p.detach().float().flatten() for p in model.params])
        steps.append({"stepped": stepped, "scale": float(optimizer.scale), "values": tensor_bytes(value)})
    return {"steps": steps}


def _built(found: Implementation, model: nn.Module, case: Case, N: int, rank: int) -> Any:
    return found.require("MixedPrecisionOptimizer")(model, N, rank, **case["options"])


def _resumed(found: Implementation, model: Half, optimizer: Any, case: Case, N: int, rank: int) -> tuple[Half, Any]:
    """As after a restart: another model, an optimizer over it, then the weights of then, then the optimizer's state."""
    weights, state = [p.detach().clone() for p in model.params], optimizer.state_dict()
    other = Half(case["seed"] + 1, case["dtype"])
    again = _built(found, other, case, N, rank)
    with torch.no_grad():
        for p, weight in zip(other.params, weights, strict=True):
            p.copy_(weight)
    again.load_state_dict(state)
    return other, again
