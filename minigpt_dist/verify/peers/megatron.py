"""Megatron-LM's tensor-parallel layers and loss (megatron-core) on CPU, against one process.

Owns both sides. Its DistributedDataParallel, its GPTModel and its schedules ask for CUDA and do not run here.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from minigpt_dist.parallel.collectives import world
from minigpt_dist.verify.peers.tensor_parallel import Answers

# By name, so that types can be checked where it is not installed.
core: Any = importlib.import_module("megatron.core")
layers: Any = importlib.import_module("megatron.core.tensor_parallel")

SIZES = {"vocab": 48, "embed": 24, "hidden": 96, "tokens": 10}  # divisible by 1, 2, 3 and 4 ranks


def _weights(dtype: str) -> dict[str, Tensor]:
    """The unsharded weights, the same on every rank, in torch's layout (out, in)."""
    g = torch.Generator().manual_seed(0)
    V, E, H = SIZES["vocab"], SIZES["embed"], SIZES["hidden"]
    shapes = {"embedding": (V, E), "up": (H, E), "up.bias": (H,), "down": (E, H), "down.bias": (E,), "head": (V, E)}
    return {name: torch.randn(shape, generator=g, dtype=getattr(torch, dtype)) / 4 for name, shape in shapes.items()}


def _tokens() -> tuple[Tensor, Tensor]:
    """Inputs and targets, (tokens, 1) each; every vocabulary shard is met, its edges too."""
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(SIZES["vocab"], (2, SIZES["tokens"], 1), generator=g)
    return ids[0], ids[1]


def sharded_body(dtype: str) -> Answers:
    """On any number of ranks: losses, and the gradient of every weight, whole."""
    N, rank = world()
    core.parallel_state.initialize_model_parallel(tensor_model_parallel_size=N)
    options: dict[str, Any] = {
        "config": core.ModelParallelConfig(
            tensor_model_parallel_size=N, use_cpu_initialization=True, params_dtype=getattr(torch, dtype)
        ),
        "init_method": torch.nn.init.zeros_,
    }
    E, H, V = SIZES["embed"], SIZES["hidden"], SIZES["vocab"]
    embedding = layers.VocabParallelEmbedding(V, E, **options)
    up = layers.ColumnParallelLinear(E, H, gather_output=False, **options)
    down = layers.RowParallelLinear(H, E, bias=True, input_is_parallel=True, skip_bias_add=False, **options)
    head = layers.ColumnParallelLinear(E, V, bias=False, gather_output=False, **options)
    cuts: dict[str, tuple[torch.nn.Parameter, int | None]] = {
        "embedding": (embedding.weight, 0), "up": (up.weight, 0), "up.bias": (up.bias, 0), "down": (down.weight, 1),
        "down.bias": (down.bias, None), "head": (head.weight, 0),
    }  # fmt: skip
    for name, whole in _weights(dtype).items():
        p, dim = cuts[name]
        p.data.copy_(whole if dim is None else whole.chunk(N, dim)[rank])
    ids, targets = _tokens()
    x = embedding(ids)
    x = x + down(F.gelu(up(x)[0]))[0]
    losses = layers.vocab_parallel_cross_entropy(head(x)[0], targets)
    losses.mean().backward()
    return {"losses": losses.detach(), **{name: _whole(p.grad, dim) for name, (p, dim) in cuts.items()}}


def _whole(grad: Tensor | None, dim: int | None) -> Tensor:
    """A gradient from its shards."""
    assert grad is not None
    if dim is None or world()[0] == 1:
        return grad
    shards = [torch.empty_like(grad) for _ in range(world()[0])]
    torch.distributed.all_gather(shards, grad.contiguous())
    return torch.cat(shards, dim)


def whole_body(dtype: str) -> Answers:
    """On one rank, with plain tensors: what the layers stand for."""
    w = {name: t.requires_grad_() for name, t in _weights(dtype).items()}
    ids, targets = _tokens()
    x = w["embedding"][ids]
    x = x + F.gelu(x @ w["up"].T + w["up.bias"]) @ w["down"].T + w["down.bias"]
    logits = x @ w["head"].T
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)
    losses.mean().backward()
    return {"losses": losses.detach(), **{name: t.grad for name, t in w.items() if t.grad is not None}}
