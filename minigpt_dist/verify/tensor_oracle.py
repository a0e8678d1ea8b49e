"""The tensor oracle: what each rank's part of a tensor-parallel layer must hold, give and get, from one process's whole layer in float64.

Owns plain torch on whole tensors, differentiated by autograd, and the cut of its results. Shares no code with `parallel/`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from minigpt_dist.verify.sequence_probe import pairs
from minigpt_dist.verify.tensor_probe import drawn, slice_of, tokens

Case = dict[str, Any]
Right = dict[str, Tensor]


def wanted(case: Case, N: int) -> list[Right]:
    """Of every rank, by the names of `tensor_probe`."""
    return RIGHT[case["kind"]](case, N)


def _cuts(whole: Tensor, N: int, dim: int = 0) -> list[Tensor]:
    return [slice_of(whole, rank, N, dim) for rank in range(N)]


def _grads(loss: Tensor, *tensors: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, tensors))


def _leaf(seed: int, *shape: int) -> Tensor:
    return drawn(seed, *shape).requires_grad_()


def _linear(case: Case, N: int) -> list[Right]:
    column, seed = case["kind"] == "column", case["seed"]
    weight, bias = _leaf(seed, case["out"], case["in"]), _leaf(seed + 1, case["out"])
    x = _leaf(seed + 2, case["rows"], 3, case["in"])
    out = F.linear(x, weight, bias if case["bias"] else None)
    d_weight, d_bias, d_x = torch.autograd.grad(
        (out * drawn(seed + 3, *out.shape)).sum(), (weight, bias, x), allow_unused=True
    )
    whole: list[tuple[str, Tensor, int | None]] = [("weight", weight, 0 if column else 1)]
    whole += [("bias", bias, 0 if column else None)] if case["bias"] else []
    whole += [("output", out, -1 if column else None), ("gradient of the input", d_x, None if column else -1)]
    whole += [("gradient of weight", d_weight, 0 if column else 1)]
    whole += [("gradient of bias", d_bias, 0 if column else None)] if case["bias"] else []
    return [{n: t.detach() if d is None else slice_of(t.detach(), r, N, d) for n, t, d in whole} for r in range(N)]


def _embedding(case: Case, N: int) -> list[Right]:
    weight = _leaf(case["seed"], case["vocab"], case["in"])
    ids = tokens(case["seed"], case["vocab"], N)[: case["rows"]]
    out = weight[ids]
    (grad,) = _grads((out * drawn(case["seed"] + 3, *out.shape)).sum(), weight)
    none = torch.zeros((), dtype=torch.float64)
    return [
        {"weight": w, "output": out.detach(), "gradient of weight": g, "gradient of padding": none}
        for w, g in zip(_cuts(weight.detach(), N), _cuts(grad, N), strict=True)
    ]


def _cross_entropy(case: Case, N: int) -> list[Right]:
    targets = tokens(case["seed"], case["vocab"], N)[: case["rows"]]
    logits = (drawn(case["seed"] + 1, len(targets), case["vocab"]) * case["scale"] + case["shift"]).requires_grad_()
    losses = F.cross_entropy(logits, targets, reduction="none")
    (grad,) = _grads((losses * drawn(case["seed"] + 2, len(targets))).sum(), logits)
    return [{"losses": losses.detach(), "gradient of logits": g} for g in _cuts(grad, N, 1)]


def _attention(case: Case, N: int) -> list[Right]:
    E, heads, seed = case["in"], case["heads"], case["seed"]
    qkv, proj = (drawn(seed, 3 * E, E) / E**0.5).requires_grad_(), (drawn(seed + 1, E, E) / E**0.5).requires_grad_()
    x = _leaf(seed + 2, case["rows"], 3, E)

    def attend(qkv: Tensor, proj: Tensor) -> Tensor:
        q, k, v = ((x @ w.T).unflatten(2, (heads, -1)).transpose(1, 2) for w in qkv.chunk(3))
        scores = q @ k.transpose(2, 3) / (E // heads) ** 0.5
        later = torch.ones(scores.shape[-2:]).triu(1).bool()
        out = torch.softmax(scores.masked_fill(later, -torch.inf), -1) @ v
        joined: Tensor = out.transpose(1, 2).flatten(2) @ proj.T
        return joined

    out = attend(qkv, proj)
    d_x, d_qkv, d_proj = _grads((out * drawn(seed + 3, *out.shape)).sum(), x, qkv, proj)
    after = attend(qkv - 0.1 * d_qkv, proj - 0.1 * d_proj)
    right = {"output": out, "gradient of the input": d_x, "output after an update": after}
    return [{name: t.detach() for name, t in right.items()}] * N


def _tied(case: Case, N: int) -> list[Right]:
    V, E, seed = case["rows"] * N, case["in"], case["seed"]
    parts = drawn(seed, V, E), drawn(seed + 1, 4 * N, E) / 2, drawn(seed + 2, 4 * N)
    weights = [t.requires_grad_() for t in (*parts, drawn(seed + 3, E, 4 * N) / 4, drawn(seed + 4, E))]
    ids, targets = tokens(seed, V, N), tokens(seed + 1, V, N)
    losses: Right = {}
    for step in range(1, case["steps"] + 1):
        table, wide, wide_bias, narrow, narrow_bias = weights
        hidden = table[ids]
        hidden = hidden + F.linear(F.gelu(F.linear(hidden, wide, wide_bias)), narrow, narrow_bias)
        loss = F.cross_entropy(hidden @ table.T, targets)
        grads = _grads(loss, *weights)
        weights = [(w - 0.5 * g).detach().requires_grad_() for w, g in zip(weights, grads, strict=True)]
        losses[f"loss of step {step}"] = loss.detach()
    return [losses] * N


def _norm(case: Case, N: int) -> list[Right]:
    E, seed = case["in"], case["seed"]
    weight, bias, x = _leaf(seed, E), _leaf(seed + 1, E), _leaf(seed + 2, 2, case["positions"] * N, E)
    out = F.layer_norm(x, (E,), weight, bias)
    d_weight, d_bias, d_x = _grads((out * drawn(seed + 3, *out.shape)).sum(), weight, bias, x)
    return [
        {"output": o, "gradient of the input": g, "gradient of weight": d_weight, "gradient of bias": d_bias}
        for o, g in zip(_cuts(out.detach(), N, 1), _cuts(d_x, N, 1), strict=True)
    ]


def _gather(case: Case, N: int) -> list[Right]:
    whole = drawn(case["seed"], 2, case["positions"] * N, 3)
    grad = torch.stack([drawn(case["seed"] + 1 + rank, *whole.shape) for rank in range(N)]).sum(0)
    return [{"output": whole, "gradient of the input": g} for g in _cuts(grad, N, 1)]


def _scatter(case: Case, N: int) -> list[Right]:
    grad = drawn(case["seed"], 2, case["positions"] * N, 3)
    total = torch.stack([drawn(case["seed"] + 1 + rank, *grad.shape) for rank in range(N)]).sum(0)
    return [{"output": part, "gradient of the input": grad} for part in _cuts(total, N, 1)]


def _clip(case: Case, N: int) -> list[Right]:
    cut = [torch.cat([drawn(case["seed"] + 10 * k + r, 6) * (1.0 + r) for k in range(2)]) for r in range(N)]
    whole = drawn(case["seed"] + 90, 5)
    norm = torch.cat([*cut, whole]).norm()
    scale = min(case["most"] / float(norm), 1.0)
    return [
        {"norm": norm, "gradients of what is cut": part * scale, "gradient of what is whole": whole * scale}
        for part in cut
    ]


RIGHT: dict[str, Callable[[Case, int], list[Right]]] = {
    "column": _linear,
    "row": _linear,
    "embedding": _embedding,
    "cross_entropy": _cross_entropy,
    "attention": _attention,
    "tied": _tied,
    "norm": _norm,
    "gather": _gather,
    "scatter": _scatter,
    "clip": _clip,
}


def two_axes(seed: int, N: int) -> list[Right]:
    """Gradients of a LayerNorm's weight and bias over both ranks of each pair."""
    found: list[Right] = []
    for replica, _ in enumerate(pairs(N)):
        weight, bias = _leaf(seed, 4), _leaf(seed + 1, 4)
        out = F.layer_norm(drawn(seed + 2 + replica, 2, 6, 4), (4,), weight, bias)
        grads = _grads((out * drawn(seed + 9, 2, 6, 4)).sum(), weight, bias)
        found += [{"weight": grads[0], "bias": grads[1]}] * 2
    return found
