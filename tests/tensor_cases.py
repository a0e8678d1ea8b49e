"""A small model to cut over ranks, in float64, and tokens for it: what the tests of tensor parallelism share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from minigpt_dist.model import MiniGPT

SIZES = {"embed_dim": 16, "num_heads": 4, "num_layers": 2, "seq_len": 8}
VOCAB, ODD = 18, 17  # rows of 18: 9, 9; 5, 5, 5, 3 and two of padding. Of 17: 9, 8 and one of padding


def plain_model(seed: int, vocab: int, tied: bool, **sizes: Any) -> MiniGPT:
    torch.manual_seed(seed)
    model = MiniGPT(vocab=vocab, tie_head=tied, **{**SIZES, **sizes}).double()
    for name, p in model.named_parameters():  # LayerNorms and biases start as ones and zeros, which hide a factor
        if p.dim() == 1:
            nn.init.normal_(p, mean=float(name.endswith("weight")), std=0.3)
    return model


def batch(vocab: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """(B, S) ids and targets in which every token occurs: the first and the last of every shard too."""
    generator = torch.Generator().manual_seed(seed)
    ids, targets = (torch.randperm(24, generator=generator).view(3, 8) % vocab for _ in range(2))
    return ids, targets
