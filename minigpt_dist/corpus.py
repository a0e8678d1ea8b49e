"""Data: a corpus that can be learnt, or the bytes of a file.

Owns determinism: the same seed gives the same tokens. Leaves which rank reads which of them to `batches.py`.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from minigpt_dist.require import require_count

BYTE_VOCAB = 256


def make_corpus(seed: int, total_tokens: int, vocab: int = 64) -> Tensor:
    """A seeded cyclic order of all `vocab` tokens, repeated: int64, shape (total_tokens,).

    Every token has one successor, so next-token loss can reach zero, and each block of B*S+1 = 65 tokens holds each of
    the 64 transitions once: every batch is worth the same, and the mean loss falls at every step. (Uniform random
    tokens, the usual toy corpus, have nothing to learn: their loss rises in about half of the steps.)
    """
    require_count("total_tokens", total_tokens, least=0)
    require_count("vocab", vocab)
    order = torch.randperm(vocab, generator=torch.Generator().manual_seed(seed))
    return order.repeat(total_tokens // vocab + 1)[:total_tokens]


def read_text(path: str | Path, needed: int) -> Tensor:
    """The bytes of a file as token ids 0..255, int64. Raises ValueError: unreadable, or shorter than `needed`."""
    try:
        raw = Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"text {str(path)!r} cannot be read: {error.strerror}") from error
    if len(raw) < needed:
        raise ValueError(f"text {str(path)!r} has {len(raw)} bytes, but the run reads {needed}")
    return torch.frombuffer(bytearray(raw[:needed]), dtype=torch.uint8).long()
