"""Is a foreign MiniGPT the model that `gpt_oracle.py` writes out, under any names and any order of its parameters?

Owns finding out which parameter is which, by shapes and declaration order: every assignment that the shapes allow is tried, and the
nearest one counts. A model with other shapes is not matched, which is neither right nor wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations

import torch
from torch import Tensor, nn

from minigpt_dist.config import ModelConfig
from minigpt_dist.verify.gpt_oracle import reference_logits

QKV_ORDERS = ("kind head d", "head kind d", "head d kind")  # the ways to lay rows of q, k and v out in one matrix


def nearest(model: nn.Module, ids: Tensor, sizes: ModelConfig) -> float | None:
    """The largest difference of logits from the written-out model with the same matrices, at the best assignment; None without one.

    Changes the model: it is put into eval mode and float64, and all vectors but LayerNorm weights become zero. RuntimeError if it cannot
    run in float64.
    """
    model.eval().double()
    matrices: list[Tensor] = []
    for p in (p.detach() for p in model.parameters()):
        if p.dim() == 2:
            matrices.append(p)
        elif not bool((p == 1).all()):
            p.zero_()
    assignments = [_named(found, sizes) for found in _assignments(matrices, sizes)]
    if not assignments:
        return None
    with torch.no_grad():
        seen = model(ids)
        return min(float((seen - _logits(p, ids, sizes)).abs().max()) for p in assignments)


def _logits(p: dict[str, Tensor], ids: Tensor, sizes: ModelConfig) -> Tensor:
    return reference_logits(p, ids, sizes.num_heads, sizes.num_layers)


def _assignments(matrices: list[Tensor], sizes: ModelConfig) -> Iterator[dict[str, Tensor]]:
    """Every way to tell embeddings, head and each block's matrices apart, by the names of our own model."""
    V, E, S = sizes.vocab, sizes.embed_dim, sizes.seq_len
    words = [m for m in matrices if tuple(m.shape) == (V, E)]
    places = [m for m in matrices if tuple(m.shape) == (S, E)]
    rest = [m for m in matrices if tuple(m.shape) not in ((V, E), (S, E))]
    each = len(rest) // sizes.num_layers
    if len(words) != 2 or len(places) != 1 or each * sizes.num_layers != len(rest):
        return
    blocks = [rest[i * each : (i + 1) * each] for i in range(sizes.num_layers)]
    choices = [list(_block(block, sizes)) for block in blocks]
    for tok, head in (words, words[::-1]):
        for same in zip(*choices, strict=False):  # all blocks are built alike
            found = {"tok_embed.weight": tok, "pos_embed.weight": places[0], "head.weight": head}
            for i, block in enumerate(same):
                found |= {f"blocks.{i}.{name}": m for name, m in block.items()}
            yield found


def _block(matrices: list[Tensor], sizes: ModelConfig) -> Iterator[dict[str, Tensor]]:
    """Every way to tell q, k, v, the projection and the two layers of the MLP apart."""
    E, hidden = sizes.embed_dim, sizes.embed_dim * sizes.mlp_ratio
    by_shape = [[m for m in matrices if tuple(m.shape) == s] for s in ((3 * E, E), (E, E), (hidden, E), (E, hidden))]
    fused, square, up, down = by_shape
    if len(up) != 1 or len(down) != 1:
        return
    mlp = {"mlp.0.weight": up[0], "mlp.2.weight": down[0]}
    if (len(fused), len(square)) == (1, 1):
        for order in QKV_ORDERS:
            yield {**mlp, "attn.qkv.weight": _recut(fused[0], order, sizes), "attn.proj.weight": square[0]}
    elif (len(fused), len(square)) == (0, 4):
        for q, k, v, proj in permutations(square):
            yield {**mlp, "attn.qkv.weight": torch.cat([q, k, v]), "attn.proj.weight": proj}


def _recut(qkv: Tensor, order: str, sizes: ModelConfig) -> Tensor:
    """Rows brought from `order` into ours: q, k, v, each head by head."""
    shape = {"kind": 3, "head": sizes.num_heads, "d": sizes.embed_dim // sizes.num_heads}
    names = order.split()
    cut = qkv.view(*(shape[name] for name in names), qkv.shape[1])
    return cut.permute(*(names.index(name) for name in ("kind", "head", "d")), 3).reshape(qkv.shape)


def _named(found: dict[str, Tensor], sizes: ModelConfig) -> dict[str, Tensor]:
    """With the vectors that `nearest` leaves: LayerNorm weights of one, and zeros."""
    E, hidden = sizes.embed_dim, sizes.embed_dim * sizes.mlp_ratio
    one, zero = torch.ones(E, dtype=torch.float64), torch.zeros(E, dtype=torch.float64)
    vectors = {"ln_f.weight": one, "ln_f.bias": zero}
    for i in range(sizes.num_layers):
        for name in ("ln1", "ln2"):
            vectors |= {f"blocks.{i}.{name}.weight": one, f"blocks.{i}.{name}.bias": zero}
        vectors |= {f"blocks.{i}.mlp.0.bias": torch.zeros(hidden, dtype=torch.float64), f"blocks.{i}.mlp.2.bias": zero}
    return {**found, **vectors}
