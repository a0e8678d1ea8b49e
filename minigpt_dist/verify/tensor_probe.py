"""The tensor probe: an implementation's tensor-parallel layers on the judge's weights and inputs; what came out, and what was sent.

Owns the rank's side, and the numbers that are drawn. Everything is float64: what a right layer rounds otherwise lies ten digits below.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from minigpt_dist.launch import ledger
from minigpt_dist.parallel.collectives import world
from minigpt_dist.trace import tensor_bytes
from minigpt_dist.verify.contract import Implementation, resolve
from minigpt_dist.verify.keywords import accepts

Case = dict[str, Any]
Shown = dict[str, Tensor | None]
Kind = Callable[[Implementation, Case, int, int], Shown]


def drawn(seed: int, *shape: int) -> Tensor:
    """Normal numbers, float64, the same wherever they are drawn."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def tokens(seed: int, vocab: int, world_size: int) -> Tensor:
    """Token ids in an order of their own: the first and last of every shard, and each of the vocabulary once."""
    rows = -(-vocab // world_size)
    edges = [min(max(edge, 0), vocab - 1) for r in range(world_size) for edge in (r * rows - 1, r * rows, r * rows + 1)]
    ids = torch.tensor([*range(vocab), *edges])
    return ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(seed))]


def slice_of(whole: Tensor, rank: int, world_size: int, dim: int = 0) -> Tensor:
    """Rank `rank`'s ceil(n/N) elements along `dim`, or what is left of them: the contract's cut."""
    size = -(-whole.shape[dim] // world_size)
    lo, hi = (min(r * size, whole.shape[dim]) for r in (rank, rank + 1))
    return whole.narrow(dim, lo, hi - lo)


def layer_body(spec: str, slots: list[str], cases: list[Case]) -> dict[str, Any]:
    """Each case in turn: every tensor that it asks about, and the bytes that this rank brought to collectives forward and backward."""
    found = resolve(spec, tuple(slots))
    return absent("tensor") if not found.offers("tensor") else {"cases": [seen(KINDS, found, case) for case in cases]}


def absent(slot: str) -> dict[str, Any]:
    """What a body answers where a piece is not asked for."""
    return {"not_judged": f"it hands in no {slot}: --slots {slot} asks for it"}


def seen(kinds: dict[str, Kind], found: Implementation, case: Case) -> dict[str, Any]:
    """One case on this rank."""
    N, rank = world()
    if N > 1:
        dist.barrier()
    ledger.clear()
    tensors = kinds[case["kind"]](found, case, N, rank)
    sent = sum(entry["bytes"] for entry in ledger.entries() if entry["op"] != "barrier")
    return {"tensors": {name: plain(t) for name, t in tensors.items()}, "sent": sent}


def plain(value: Tensor | None) -> dict[str, Any]:
    """A tensor as bytes with shape and dtype; of what is none, its type."""
    if not isinstance(value, Tensor):
        return {"dtype": type(value).__name__, "shape": [], "raw": b""}
    return {
        "dtype": str(value.dtype).removeprefix("torch."),
        "shape": list(value.shape),
        "raw": tensor_bytes(value.detach()),
    }


def grad_of(p: Any) -> Tensor | None:
    return p.grad if isinstance(p, Tensor) else None


def _attribute(module: nn.Module, name: str) -> Tensor | None:
    value = getattr(module, name, None)
    return value.detach().clone() if isinstance(value, Tensor) else None


def _linear(found: Implementation, name: str, case: Case, N: int, rank: int) -> tuple[nn.Module, Tensor, Shown]:
    weight, bias = drawn(case["seed"], case["out"], case["in"]), drawn(case["seed"] + 1, case["out"])
    layer = found.require(name)(weight, bias if case["bias"] else None, N, rank)
    x = drawn(case["seed"] + 2, case["rows"], 3, case["in"])
    seen = {"weight": _attribute(layer, "weight")} | ({"bias": _attribute(layer, "bias")} if case["bias"] else {})
    return layer, x, seen


def _column(found: Implementation, case: Case, N: int, rank: int) -> Shown:
    layer, x, seen = _linear(found, "ColumnParallelLinear", case, N, rank)
    x.requires_grad_()
    out = layer(x)
    seen["output"] = out.detach().clone()
    up = slice_of(drawn(case["seed"] + 3, case["rows"], 3, case["out"]), rank, N, -1)
    (out * up).sum().backward()
    return seen | _gradients(layer, x, case)


def _row(found: Implementation, case: Case, N: int, rank: int) -> Shown:
    layer, x, seen = _linear(found, "RowParallelLinear", case, N, rank)
    x = slice_of(x, rank, N, -1).clone().requires_grad_()
    out = layer(x)
    seen["output"] = out.detach().clone()
    (out * drawn(case["seed"] + 3, case["rows"], 3, case["out"])).sum().backward()
    return seen | _gradients(layer, x, case)


def _gradients(layer: nn.Module, x: Tensor, case: Case) -> Shown:
    seen: Shown = {"gradient of the input": x.grad, "gradient of weight": grad_of(layer.weight)}
    return seen | ({"gradient of bias": grad_of(layer.bias)} if case["bias"] else {})


def _embedding(found: Implementation, case: Case, N: int, rank: int) -> Shown:
    weight = drawn(case["seed"], case["vocab"], case["in"])
    layer = found.require("VocabParallelEmbedding")(weight, N, rank)
    rows = len(slice_of(weight, rank, N))
    ids = tokens(case["seed"], case["vocab"], N)[: case["rows"]]
    seen: Shown = {"weight": layer.weight.detach()[:rows].clone()}
    out = layer(ids)
    seen["output"] = out.detach().clone()
    (out * drawn(case["seed"] + 3, len(ids), case["in"])).sum().backward()
    grad = grad_of(layer.weight)
    seen["gradient of weight"] = None if grad is None else grad[:rows]
    seen["gradient of padding"] = None if grad is None else grad[rows:].sum()
    return seen


def _cross_entropy(found: Implementation, case: Case, N: int, rank: int) -> Shown:
    targets = tokens(case["seed"], case["vocab"], N)[: case["rows"]]
    whole = drawn(case["seed"] + 1, len(targets), case["vocab"]) * case["scale"] + case["shift"]
    logits = slice_of(whole, rank, N, 1).clone().requires_grad_()
    losses = found.require("vocab_parallel_cross_entropy")(logits * 1.0, targets, case["vocab"], N, rank)
    (losses * drawn(case["seed"] + 2, len(targets))).sum().backward()
    return {"losses": losses, "gradient of logits": logits.grad}


def _attention(found: Implementation, case: Case, N: int, rank: int) -> Shown:
    E = case["in"]
    qkv, proj = drawn(case["seed"], 3 * E, E) / E**0.5, drawn(case["seed"] + 1, E, E) / E**0.5
    layer = found.require("ParallelAttention")(qkv, proj, case["heads"], N, rank)
    x = drawn(case["seed"] + 2, case["rows"], 3, E).requires_grad_()
    out = layer(x)
    (out * drawn(case["seed"] + 3, case["rows"], 3, E)).sum().backward()
    return {"output": out, "gradient of the input": x.grad, **_updated(layer, x)}


def _updated(layer: nn.Module, x: Tensor) -> Shown:
    """The output after a step of gradient descent, which shows every gradient whatever its parameter is called."""
    _descend(layer, 0.1)
    with torch.no_grad():
        return {"output after an update": layer(x)}


def _tied(found: Implementation, case: Case, N: int, rank: int) -> Shown:
    """An embedding, an MLP with a residual, and a head that is the embedding's own weight, trained by gradient descent."""
    V, E, seed = case["rows"] * N, case["in"], case["seed"]
    table = found.require("VocabParallelEmbedding")(drawn(seed, V, E), N, rank)
    wide = found.require("ColumnParallelLinear")(drawn(seed + 1, 4 * N, E) / 2, drawn(seed + 2, 4 * N), N, rank)
    narrow = found.require("RowParallelLinear")(drawn(seed + 3, E, 4 * N) / 4, drawn(seed + 4, E), N, rank)
    head = found.require("ColumnParallelLinear")(drawn(seed, V, E), None, N, rank)
    head.weight = table.weight
    layers = nn.ModuleList([table, wide, narrow, head])
    ids, targets = tokens(seed, V, N), tokens(seed + 1, V, N)
    seen: Shown = {}
    for step in range(1, case["steps"] + 1):
        layers.zero_grad()
        hidden = table(ids)
        logits = head(hidden + narrow(F.gelu(wide(hidden))))
        loss = found.require("vocab_parallel_cross_entropy")(logits, targets, V, N, rank).mean()
        loss.backward()
        seen[f"loss of step {step}"] = loss.detach()
        _descend(layers, 0.5)
    return seen


def _descend(layers: nn.Module, lr: float) -> None:
    with torch.no_grad():
        for p in layers.parameters():
            p.sub_(torch.zeros_like(p) if p.grad is None else p.grad, alpha=lr)


KINDS: dict[str, Kind] = {
    "column": _column,
    "row": _row,
    "embedding": _embedding,
    "cross_entropy": _cross_entropy,
    "attention": _attention,
    "tied": _tied,
}


def dropout_body(spec: str, slots: list[str], heads: int) -> dict[str, Any]:
    """Attention whose heads have one and the same weights, under dropout: what each head gave, and a number from torch's stream then."""
    found, (N, rank) = resolve(spec, tuple(slots)), world()
    if not found.offers("tensor"):
        return absent("tensor")
    build = found.require("ParallelAttention")
    if not accepts(build, "dropout"):
        return {"not_judged": "ParallelAttention takes no dropout"}
    size = 2
    one = drawn(1, 3, size, heads * size)
    qkv = one.repeat(1, heads, 1).view(
        3 * heads * size, heads * size
    )  # each of q, k, v: one head, as often as there are heads
    layer = build(qkv, torch.eye(heads * size, dtype=torch.float64), heads, N, rank, dropout=0.5)
    torch.manual_seed(5)
    out = layer(drawn(2, 2, 8, heads * size)).unflatten(2, (heads, size))
    after = float(torch.rand(()))
    layer.eval()
    calm = layer(drawn(2, 2, 8, heads * size)).unflatten(2, (heads, size))
    return {"heads": [plain(out[:, :, h]) for h in range(heads)], "calm": plain(calm[:, :, -1]), "after": after}
