"""The sequence probe: what stands between cut layers, where positions are cut over ranks, and the clipping of gradients that are cut.

Owns the rank's side of both. Numbers are drawn and shown as in `tensor_probe`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from minigpt_dist.parallel.collectives import world
from minigpt_dist.verify.contract import Implementation, resolve
from minigpt_dist.verify.keywords import accepted, accepts
from minigpt_dist.verify.tensor_probe import Case, Kind, Shown, absent, drawn, grad_of, plain, seen, slice_of


def sequence_body(spec: str, slots: list[str], slot: str, cases: list[Case]) -> dict[str, Any]:
    """Each case in turn, of the pieces `sequence` or `clipping`."""
    found = resolve(spec, tuple(slots))
    return absent(slot) if not found.offers(slot) else {"cases": [seen(KINDS, found, case) for case in cases]}


def _norm(found: Implementation, case: Case, N: int, rank: int) -> Shown:
    E = case["in"]
    layer = found.require("SequenceLayerNorm")(drawn(case["seed"], E), drawn(case["seed"] + 1, E), N, rank)
    x = slice_of(drawn(case["seed"] + 2, 2, case["positions"] * N, E), rank, N, 1).clone().requires_grad_()
    out = layer(x)
    (out * slice_of(drawn(case["seed"] + 3, 2, case["positions"] * N, E), rank, N, 1)).sum().backward()
    shown: Shown = {"output": out, "gradient of the input": x.grad, "gradient of weight": grad_of(layer.weight)}
    return shown | {"gradient of bias": grad_of(layer.bias)}


def _gather(found: Implementation, case: Case, N: int, rank: int) -> Shown:
    """Every rank uses all positions, each in its own way."""
    x = slice_of(drawn(case["seed"], 2, case["positions"] * N, 3), rank, N, 1).clone().requires_grad_()
    out = found.require("gather_sequence")(x)
    (out * drawn(case["seed"] + 1 + rank, 2, case["positions"] * N, 3)).sum().backward()
    return {"output": out, "gradient of the input": x.grad}


def _scatter(found: Implementation, case: Case, N: int, rank: int) -> Shown:
    """Every rank brings a part of the sum."""
    x = drawn(case["seed"] + 1 + rank, 2, case["positions"] * N, 3).requires_grad_()
    out = found.require("scatter_sequence")(x)
    (out * slice_of(drawn(case["seed"], 2, case["positions"] * N, 3), rank, N, 1)).sum().backward()
    return {"output": out, "gradient of the input": x.grad}


def _clip(found: Implementation, case: Case, N: int, rank: int) -> Shown:
    """Two parameters that are cut and one that is whole, with gradients given; one more without any."""
    cut = [nn.Parameter(torch.zeros(6, dtype=torch.float64)) for _ in range(2)]
    whole = [nn.Parameter(torch.zeros(5, dtype=torch.float64)) for _ in range(2)]
    for k, p in enumerate(cut):
        p.grad = drawn(case["seed"] + 10 * k + rank, 6) * (1.0 + rank)
    whole[0].grad = drawn(case["seed"] + 90, 5)
    norm = found.require("clip_sharded_grad_norm")(cut, whole, case["most"])
    return {
        "norm": torch.as_tensor(norm, dtype=torch.float64).reshape(()),
        "gradients of what is cut": torch.cat([p.grad for p in cut if p.grad is not None]),
        "gradient of what is whole": whole[0].grad,
    }


KINDS: dict[str, Kind] = {"norm": _norm, "gather": _gather, "scatter": _scatter, "clip": _clip}


def two_axes_body(spec: str, slots: list[str], seed: int) -> dict[str, Any]:
    """A LayerNorm over groups of two ranks, one group for each replica: gradients of weight and bias on this rank."""
    found, (N, rank) = resolve(spec, tuple(slots)), world()
    if not found.offers("sequence"):
        return absent("sequence")
    build = found.require("SequenceLayerNorm")
    if not accepts(build, "group"):
        return {"not_judged": "SequenceLayerNorm takes no group"}
    group = [dist.new_group(list(pair)) for pair in pairs(N)][rank // 2]
    layer = build(drawn(seed, 4), drawn(seed + 1, 4), 2, rank % 2, **accepted(build, {"group": group}))
    x = slice_of(drawn(seed + 2 + rank // 2, 2, 6, 4), rank % 2, 2, 1).clone()
    (layer(x) * slice_of(drawn(seed + 9, 2, 6, 4), rank % 2, 2, 1)).sum().backward()
    return {"weight": plain(grad_of(layer.weight)), "bias": plain(grad_of(layer.bias))}


def pairs(world_size: int) -> Sequence[tuple[int, int]]:
    """The ranks of each replica, two by two."""
    return [(r, r + 1) for r in range(0, world_size, 2)]
