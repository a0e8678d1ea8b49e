"""The modules whose tensors are broadcast, and what a rank does with them; plain data comes back.

Owns the rank's side. Leaves the verdict to `checks/broadcast.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from minigpt_dist.parallel.collectives import world
from minigpt_dist.trace import tensor_bytes
from minigpt_dist.verify.contract import resolve
from minigpt_dist.verify.keywords import accepts


class Zoo(nn.Module):
    """One tensor of every kind a broadcast can forget, filled from the rank's own seed: frozen, tied, scalar, half and double precision,
    large, buffers of several dtypes, a buffer that is not saved, a child's buffers."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(5, 7, generator=g))
        self.frozen = nn.Parameter(torch.randn(4, generator=g), requires_grad=False)
        self.scalar = nn.Parameter(torch.randn((), generator=g))
        self.bf16 = nn.Parameter(torch.randn(9, generator=g).bfloat16())
        self.fp64 = nn.Parameter(torch.randn(3, generator=g, dtype=torch.float64))
        self.large = nn.Parameter(torch.randn(70_001, generator=g))
        self.norm = nn.BatchNorm1d(3)
        self.tied = self.weight
        self.register_buffer("running", torch.randn(3, generator=g))
        self.register_buffer("count", torch.randint(2**33, 2**40, (2,), generator=g))
        self.register_buffer("mask", torch.rand(11, generator=g) > 0.5)
        self.register_buffer("hidden", torch.randn(2, generator=g), persistent=False)
        self.norm.running_mean = torch.randn(3, generator=g)
        self.norm.num_batches_tracked = torch.randint(1, 99, (), generator=g)


class OddLayouts(nn.Module):
    """Tensors that some collectives refuse: not contiguous, without elements. Filled from the rank's own seed."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(seed)
        self.transposed = nn.Parameter(torch.randn(6, 3, generator=g).t())
        self.empty = nn.Parameter(torch.randn(0, generator=g))
        self.last = nn.Parameter(torch.randn(2, generator=g))


def contents(module: nn.Module) -> dict[str, list[Any]]:
    """Dtype, shape and bytes of every parameter and buffer, by name."""
    named = [*module.named_parameters(), *module.named_buffers()]
    return {name: [str(t.dtype), list(t.shape), tensor_bytes(t)] for name, t in named}


def broadcast_body(spec: str, slots: list[str], seed: int, src: int, odd: bool) -> dict[str, Any]:
    """What the module holds after the call on this rank. What it held before, and should hold now, the judge makes for himself."""
    call = resolve(spec, tuple(slots)).require("broadcast_parameters")
    if src and not accepts(call, "src"):
        return {"not_judged": "broadcast_parameters takes no src"}
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)  # whatever the implementation has made of it
    module = (OddLayouts if odd else Zoo)(seed + world()[1])
    torch.set_default_dtype(usual)
    objects = dict(module.named_parameters())
    module.train(odd)
    if src:
        call(module, src=src)
    else:
        call(module)
    trainable = [name for name, p in module.named_parameters() if p.requires_grad]
    return {
        "after": contents(module),
        "trainable": trainable,
        "replaced": [
            n
            for n, p in module.named_parameters(remove_duplicate=False)
            if p is not objects.get(n, objects.get("weight"))
        ],
        "mode_kept": module.training == odd,
    }
