"""Data: a corpus that can be learnt, and which tokens each rank reads at each step.

Owns determinism: the same seed gives the same tokens, and every token of the corpus is read by one rank once.
Leaves batching over epochs and shuffling out, on purpose: position in the data is a function of the step alone.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from minigpt_dist.config import TrainConfig, require_count

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


def block_start(config: TrainConfig, step: int, rank: int, micro_batch: int) -> int:
    """Index of the first token that `rank` reads in its `micro_batch` at `step` (0-based).

    Blocks are numbered by their place in the *global* batch, so the same global batch is cut the same way
    whether few ranks read many micro-batches each or many ranks read few.
    """
    per_step = config.world_size * config.micro_batches
    return (step * per_step + rank * config.micro_batches + micro_batch) * config.block_tokens


def read_batch(
    corpus: Tensor, config: TrainConfig, step: int, rank: int, micro_batch: int = 0
) -> tuple[Tensor, Tensor]:
    """Inputs and targets of one micro-batch, each (B, S) int64, targets one token later than inputs."""
    start = block_start(config, step, rank, micro_batch)
    block = corpus[start : start + config.block_tokens]
    if block.numel() < config.block_tokens:
        raise ValueError(
            f"corpus has {corpus.numel()} tokens, but step {step} reads up to {start + config.block_tokens}"
        )
    shape = (config.batch, config.model.seq_len)
    return block[:-1].view(shape), block[1:].view(shape)
