"""Batches: which tokens of a corpus each rank reads at each step.

Owns that every token is read by one rank once. Leaves batching over epochs and shuffling out, on purpose: position in the data is a
function of the step alone.
"""

from __future__ import annotations

from torch import Tensor

from minigpt_dist.config import TrainConfig


def block_start(config: TrainConfig, step: int, rank: int, micro_batch: int) -> int:
    """Index of the first token that data-parallel rank `rank` reads in its `micro_batch` at `step` (0-based).

    Blocks are numbered by their place in the *global* batch, so the same global batch is cut the same way
    whether few ranks read many micro-batches each or many ranks read few.
    """
    per_step = config.dp * config.micro_batches
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
