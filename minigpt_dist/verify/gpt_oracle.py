"""MiniGPT's forward pass written out on plain tensors, to hold the module against.

Owns a second derivation: explicit masked softmax, explicit LayerNorm, explicit GELU. Shares no code with `model.py`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Ba et al. 2016: (x - mean) / sqrt(var + 1e-5) over the last axis, biased variance."""
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight + bias


def _attention(x: Tensor, qkv: Tensor, proj: Tensor, heads: int) -> Tensor:
    """Softmax of q k^T / sqrt(d) over positions up to one's own, head by head."""
    _, S, E = x.shape
    d = E // heads
    q, k, v = (x @ w.T for w in qkv.chunk(3))
    future = torch.ones(S, S, dtype=torch.bool).triu(1)
    out = []
    for h in range(heads):
        part = slice(h * d, (h + 1) * d)
        scores = (q[..., part] @ k[..., part].transpose(1, 2) / math.sqrt(d)).masked_fill(future, -math.inf)
        out.append(scores.softmax(-1) @ v[..., part])
    return torch.cat(out, -1) @ proj.T


def reference_logits(p: dict[str, Tensor], ids: Tensor, heads: int, layers: int) -> Tensor:
    """Logits (B, S, vocab) from named parameters as `MiniGPT` names them, no dropout."""
    x = p["tok_embed.weight"][ids] + p["pos_embed.weight"][: ids.shape[1]]
    for i in range(layers):
        b = f"blocks.{i}."
        h = _layer_norm(x, p[b + "ln1.weight"], p[b + "ln1.bias"])
        x = x + _attention(h, p[b + "attn.qkv.weight"], p[b + "attn.proj.weight"], heads)
        h = _layer_norm(x, p[b + "ln2.weight"], p[b + "ln2.bias"]) @ p[b + "mlp.0.weight"].T + p[b + "mlp.0.bias"]
        h = h * 0.5 * (1 + torch.erf(h / math.sqrt(2)))  # Hendrycks & Gimpel 2016, exact form
        x = x + h @ p[b + "mlp.2.weight"].T + p[b + "mlp.2.bias"]
    x = _layer_norm(x, p["ln_f.weight"], p["ln_f.bias"])
    return x @ p.get("head.weight", p["tok_embed.weight"]).T
