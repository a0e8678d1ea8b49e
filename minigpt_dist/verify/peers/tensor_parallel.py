"""torch.distributed.tensor.parallel on a block's MLP, against the unsharded MLP.

Owns both sides' forward and backward. Rows of the second matrix are added over ranks, in another order than within one: equal within
rounding, not bit for bit.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from minigpt_dist.parallel.collectives import world

Answers = dict[str, Tensor]


def _mlp_and_input(dtype: str, embed_dim: int, hidden: int) -> tuple[nn.Module, Tensor, Tensor]:
    """The same on every rank: an MLP, its input and the gradient of its output, (4, embed_dim) each."""
    torch.manual_seed(0)
    kind = getattr(torch, dtype)
    mlp = nn.Sequential(nn.Linear(embed_dim, hidden), nn.GELU(), nn.Linear(hidden, embed_dim)).to(kind)
    return mlp, torch.randn(4, embed_dim, dtype=kind).requires_grad_(), torch.randn(4, embed_dim, dtype=kind)


def _answers(mlp: nn.Module, x: Tensor, upstream: Tensor) -> Answers:
    """Output, gradient of the input, and gradient of every parameter, whole."""
    out = mlp(x)
    out.backward(upstream)
    assert x.grad is not None
    grads = {name: p.grad for name, p in mlp.named_parameters()}
    found = {
        "output": out.detach(),
        "input.grad": x.grad,
        **{f"{name}.grad": g for name, g in grads.items() if g is not None},
    }
    return {name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in found.items()}


def sharded_body(dtype: str, embed_dim: int, hidden: int) -> Answers:
    """On any number of ranks: first matrix by columns (output features), second by rows."""
    mlp, x, upstream = _mlp_and_input(dtype, embed_dim, hidden)
    mesh = init_device_mesh("cpu", (world()[0],))
    parallelize_module(mlp, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return _answers(mlp, x, upstream)


def whole_body(dtype: str, embed_dim: int, hidden: int) -> Answers:
    """On one rank: the MLP as it is."""
    return _answers(*_mlp_and_input(dtype, embed_dim, hidden))
