"""MiniGPT: a decoder-only transformer small enough to train on four processes in a second.

Owns the forward pass of one unsharded model. Leaves every kind of parallelism to `parallel/`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class CausalSelfAttention(nn.Module):
    """Masked multi-head self-attention (Vaswani et al. 2017, section 3.2), biasless projections."""

    def __init__(self, embed_dim: int, num_heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        if embed_dim % num_heads:
            raise ValueError(f"embed_dim is {embed_dim}, but should be a multiple of num_heads ({num_heads})")
        self.num_heads = num_heads
        self.dropout = dropout
        self.qkv = nn.Linear(embed_dim, 3 * embed_dim, bias=False)
        self.proj = nn.Linear(embed_dim, embed_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        B, S, E = x.shape
        qkv = self.qkv(x).view(B, S, 3, self.num_heads, E // self.num_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (B, heads, S, E/heads)
        dropout = self.dropout if self.training else 0.0
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.proj(out.transpose(1, 2).reshape(B, S, E))  # type: ignore[no-any-return]  # nn.Module call is Any


class Block(nn.Module):
    """Pre-LayerNorm block: x + attention(norm(x)), then x + mlp(norm(x)) (Xiong et al. 2020)."""

    def __init__(self, embed_dim: int, num_heads: int, mlp_ratio: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.ln1 = nn.LayerNorm(embed_dim)
        self.attn = CausalSelfAttention(embed_dim, num_heads, dropout)
        self.ln2 = nn.LayerNorm(embed_dim)
        self.mlp = nn.Sequential(
            nn.Linear(embed_dim, mlp_ratio * embed_dim),
            nn.GELU(),
            nn.Linear(mlp_ratio * embed_dim, embed_dim),
        )
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attn(self.ln1(x)))
        out: Tensor = x + self.drop(self.mlp(self.ln2(x)))
        return out


class MiniGPT(nn.Module):
    """Token and position embeddings, `num_layers` blocks, a final LayerNorm and a language-model head.

    `forward(ids)` maps token ids (B, S), int64, to logits (B, S, vocab). With the defaults P = 29,824.
    Raises ValueError for a sequence longer than `seq_len`.
    """

    def __init__(
        self,
        vocab: int = 64,
        embed_dim: int = 32,
        num_heads: int = 4,
        num_layers: int = 2,
        seq_len: int = 16,
        mlp_ratio: int = 4,
        dropout: float = 0.0,
        tie_head: bool = False,
    ) -> None:
        super().__init__()
        self.seq_len = seq_len
        self.tok_embed = nn.Embedding(vocab, embed_dim)
        self.pos_embed = nn.Embedding(seq_len, embed_dim)
        self.blocks = nn.ModuleList(Block(embed_dim, num_heads, mlp_ratio, dropout) for _ in range(num_layers))
        self.ln_f = nn.LayerNorm(embed_dim)
        self.head = nn.Linear(embed_dim, vocab, bias=False)
        if tie_head:
            self.head.weight = self.tok_embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        S = ids.shape[1]
        if self.seq_len < S:
            raise ValueError(f"sequence length is {S}, but should be at most {self.seq_len}")
        x = self.tok_embed(ids) + self.pos_embed(torch.arange(S, device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln_f(x))  # type: ignore[no-any-return]  # nn.Module call is Any
