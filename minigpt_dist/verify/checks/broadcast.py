"""Does broadcast_parameters give every rank the source's parameters and buffers, and leave the source as it was?"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from minigpt_dist.parallel.collectives import world
from minigpt_dist.trace import digest
from minigpt_dist.verify.checks.registry import Check, register
from minigpt_dist.verify.contract import accepts, resolve
from minigpt_dist.verify.subject import NotJudged, Subject
from minigpt_dist.verify.violation import Violation


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


def _digests(module: nn.Module) -> dict[str, str]:
    return {name: digest(t) for name, t in [*module.named_parameters(), *module.named_buffers()]}


def broadcast_body(spec: str, slots: list[str], src: int, odd: bool) -> dict[str, Any]:
    """Digests before and after the call on this rank."""
    call = resolve(spec, tuple(slots)).require("broadcast_parameters")
    if src and not accepts(call, "src"):
        return {"not_judged": "broadcast_parameters takes no src"}
    module = (OddLayouts if odd else Zoo)(seed=100 + world()[1])
    before = _digests(module)
    objects = dict(module.named_parameters())
    module.train(odd)
    if src:
        call(module, src=src)
    else:
        call(module)
    trainable = [name for name, p in module.named_parameters() if p.requires_grad]
    return {
        "before": before,
        "after": _digests(module),
        "trainable": trainable,
        "replaced": [
            n
            for n, p in module.named_parameters(remove_duplicate=False)
            if p is not objects.get(n, objects.get("weight"))
        ],
        "mode_kept": module.training == odd,
    }


def _check(subject: Subject, world_size: int, src: int, odd: bool = False) -> list[Violation]:
    results = subject.ask(broadcast_body, world_size, src, odd)
    if "not_judged" in results[0]:
        raise NotJudged(results[0]["not_judged"])
    wanted = results[src]["before"]
    for rank, r in enumerate(results):
        for name, value in wanted.items():
            seen = r["after"].get(name)
            if seen != value:
                unchanged = seen == r["before"].get(name)
                hint = "it still has the value of this rank's own seed" if unchanged and rank != src else ""
                if rank == src:
                    hint = "the source itself was changed"
                return [
                    Violation(
                        "the tensor's bytes after the broadcast (sha256)",
                        str(seen)[:16],
                        f"{value[:16]}, rank {src}'s",
                        "broadcast",
                        step=0,
                        rank=rank,
                        tensor=name,
                        hint=hint,
                    )
                ]
        if r["replaced"]:
            name = r["replaced"][0]
            return [
                Violation(
                    "the parameter",
                    "another object than before",
                    "the same, with new values",
                    "broadcast",
                    step=0,
                    rank=rank,
                    tensor=name,
                    hint="ties, hooks and optimizers made before are cut off",
                )
            ]
        if not r["mode_kept"]:
            return [Violation("the module's training mode", "changed", "as before", "broadcast", step=0, rank=rank)]
        if "frozen" in r["trainable"]:
            return [
                Violation(
                    "requires_grad of a frozen parameter",
                    "True",
                    "False, as before",
                    "broadcast",
                    step=0,
                    rank=rank,
                    tensor="frozen",
                )
            ]
    return []


def broadcast_from_first(subject: Subject, world_size: int) -> list[Violation]:
    """Everything of rank 0 reaches all ranks, bit for bit."""
    return _check(subject, world_size, 0)


def broadcast_from_last(subject: Subject, world_size: int) -> list[Violation]:
    """The same from the last rank."""
    return _check(subject, world_size, world_size - 1)


def broadcast_of_odd_layouts(subject: Subject, world_size: int) -> list[Violation]:
    """Parameters that are not contiguous, and empty ones, reach all ranks, or are refused aloud."""
    return _check(subject, world_size, 0, odd=True)


register(
    Check(
        "broadcast.layouts",
        "tensors that are not contiguous reach every rank",
        broadcast_of_odd_layouts,
        ("broadcast",),
        "broadcast",
        world_sizes=(2, 3),
        exotic=True,
    )
)
register(
    Check(
        "broadcast.first",
        "parameters and buffers of rank 0 reach every rank",
        broadcast_from_first,
        ("broadcast",),
        "broadcast",
    )
)
register(
    Check(
        "broadcast.last",
        "src chooses the rank that is copied",
        broadcast_from_last,
        ("broadcast",),
        "broadcast",
        world_sizes=(2, 3, 4),
    )
)
