"""The recompute probe: the same blocks run plainly and through an implementation's recompute, from the same weights and random stream.

Owns the rank's side: the blocks, and what is looked at. Both runs give their results as bytes; the judge compares them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from minigpt_dist.activations import SavedBytes
from minigpt_dist.trace import tensor_bytes
from minigpt_dist.verify.contract import resolve

Call = Callable[..., Tensor]
Seen = dict[str, Tensor]
WIDTH, BLOCKS = 8, 3


class Block(nn.Module):
    """x + MLP(norm(x)), with dropout; counts its calls, and keeps a running mean, in buffers."""

    calls: Tensor
    mean: Tensor

    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = dropout
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.norm(x)
        self.calls += 1
        self.mean.lerp_(hidden.detach().flatten(0, -2).mean(0), 0.5)
        hidden = F.dropout(F.gelu(self.up(hidden)), self.dropout, self.training)
        out: Tensor = x + self.down(hidden)
        return out


class Mixed(nn.Module):
    """Of two tensors, a mask, a number, and a flag; a part of it is outside of autograd's view."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor, y: Tensor, mask: Tensor, factor: float, flag: bool | None = None) -> Tensor:
        with torch.no_grad():
            weights = torch.softmax(x @ self.weight, -1)
        out = torch.where(mask, x @ self.weight * factor, y * weights)
        return out if flag is None else out.tanh()


def blocks(dropout: float = 0.0, width: int = WIDTH) -> nn.ModuleList:
    torch.manual_seed(3)
    return nn.ModuleList(Block(width, dropout) for _ in range(BLOCKS))


def plainly(block: nn.Module, *args: Any) -> Tensor:
    """What recompute must equal."""
    out: Tensor = block(*args)
    return out


def _gradients(module: nn.Module, **inputs: Tensor) -> Seen:
    seen = {f"gradient of {name}": t.grad for name, t in inputs.items()}
    seen |= {f"gradient of {name}": p.grad for name, p in module.named_parameters()}
    return {name: torch.full((), torch.nan) if grad is None else grad.clone() for name, grad in seen.items()}


def _chained(call: Call, dropout: float = 0.0, trained: bool = True, backwards: int = 1) -> Seen:
    """Block after block; the state of buffers and of the random stream afterwards."""
    chain = blocks(dropout)
    x = torch.randn(2, 5, WIDTH, requires_grad=trained)
    out = x
    for _ in range(backwards):
        out = x
        for block in chain:
            out = call(block, out)
        out.square().sum().backward()
    seen: Seen = {"output": out.detach(), **_gradients(chain, **({"the input": x} if trained else {}))}
    return (
        seen | {f"buffer {name}": b.clone() for name, b in chain.named_buffers()} | {"the random stream": torch.rand(4)}
    )


def _dropout(call: Call) -> Seen:
    return _chained(call, dropout=0.5)


def _untrained_input(call: Call) -> Seen:
    return _chained(call, trained=False)


def _several_backwards(call: Call) -> Seen:
    return _chained(call, backwards=2)


def _arguments(call: Call) -> Seen:
    torch.manual_seed(4)
    module = Mixed()
    x, y = (torch.randn(3, WIDTH, requires_grad=True) for _ in range(2))
    mask = torch.rand(3, WIDTH) < 0.5
    out = call(module, x, y, mask, 1.5, None) + call(module, y, x, ~mask, -0.5, True)
    out.square().sum().backward()
    return {"output": out.detach(), **_gradients(module, x=x, y=y)}


def _evaluation(call: Call) -> Seen:
    chain = blocks().eval()
    x = torch.randn(2, 5, WIDTH)
    with torch.no_grad():
        out = call(chain[0], x)
    return {"output": out.detach(), "whether it wants a gradient": torch.tensor(out.requires_grad)}


def _autocast(call: Call) -> Seen:
    chain = blocks()
    x = torch.randn(2, 5, WIDTH, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = call(chain[1], call(chain[0], x))
    out.float().square().sum().backward()
    return {"output": out.detach(), **_gradients(chain[:2], **{"the input": x})}


KINDS: dict[str, Callable[[Call], Seen]] = {
    "blocks": _chained,
    "dropout": _dropout,
    "untrained_input": _untrained_input,
    "several_backwards": _several_backwards,
    "arguments": _arguments,
    "evaluation": _evaluation,
    "autocast": _autocast,
}


def recompute_body(spec: str, slots: list[str], kinds: list[str]) -> dict[str, Any]:
    """Per kind, what both runs gave: {name: (bytes plainly, bytes recomputed)}."""
    found = resolve(spec, tuple(slots))
    if not found.offers("recompute"):
        return {"not_judged": "it hands in no recompute: --slots recompute asks for it"}
    call, shown = found.require("recompute"), {}
    for kind in kinds:
        right, seen = KINDS[kind](plainly), KINDS[kind](call)
        shown[kind] = {name: [_raw(right[name]), _raw(seen[name])] for name in right}
    return {"kinds": shown}


def _raw(tensor: Tensor) -> bytes:
    return str(tensor.dtype).encode() + str(tuple(tensor.shape)).encode() + tensor_bytes(tensor.detach().contiguous())


def kept_body(spec: str, slots: list[str], rows: int, width: int) -> dict[str, Any]:
    """Bytes that autograd keeps between forward and backward, plainly and recomputed, and the most in backward; and of an input."""
    found = resolve(spec, tuple(slots))
    if not found.offers("recompute"):
        return {"not_judged": "it hands in no recompute: --slots recompute asks for it"}
    seen: dict[str, Any] = {"input": 4 * rows * width}
    for name, call in (("plainly", plainly), ("recomputed", found.require("recompute"))):
        chain = blocks(width=width)
        x = torch.randn(rows, width, requires_grad=True)
        with SavedBytes([*chain.parameters()]) as saved, nullcontext():
            out = x
            for block in chain:
                out = call(block, out)
            seen[name] = saved.now
            saved.peak = saved.now
            out.sum().backward()
            seen[f"{name}, in backward"] = saved.peak
    return seen
