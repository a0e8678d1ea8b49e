"""Which part of a model a pipeline rank holds: the embedding, some blocks, the head.

Owns the cut. Stage s of S lives on rank s % pp, as in `parallel/pipeline/schedule.py`.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import lru_cache

from minigpt_dist.layout import Layout
from minigpt_dist.planner.shape import ModelShape


@dataclass(frozen=True)
class Share:
    """What one pipeline rank holds. stages: the blocks of each of its stages."""

    rank: int
    embedding: bool
    stages: tuple[int, ...]
    head: bool

    @property
    def blocks(self) -> int:
        return sum(self.stages)

    def numel(self, shape: ModelShape, layout: Layout) -> int:
        """Parameters on a rank that holds this share."""
        embedding = shape.embedding_numel(layout) if self.embedding else 0
        head = shape.head_numel(layout) if self.head else 0
        return embedding + self.blocks * shape.block_numel(layout.tp) + head


@lru_cache(maxsize=1024)
def block_counts(blocks: int, stages: int, head: float) -> tuple[int, ...]:
    """Blocks a stage, so that the most expensive stage is as cheap as it can be; the head, on the last one, costs as much as `head` blocks.

    What is to spare goes to early stages, so that the last is no longer than the others. Where stages are more than blocks, embedding
    and head are layers like others, cut evenly, and a stage may be one of them alone. ValueError for more stages than that.
    """
    if not 1 <= stages <= blocks + 2:
        wanted = f"at most {blocks + 2}: an embedding, {blocks} blocks and a head"
        raise ValueError(f"number of pipeline stages is {stages}, but should be {wanted}")
    if stages > blocks:
        base, more = divmod(blocks + 2, stages)
        layers = [base + (s < more) for s in range(stages)]
        return (layers[0] - 1, *layers[1:-1], layers[-1] - 1)
    if stages == 1:
        return (blocks,)
    last = min(range(1, blocks - stages + 2), key=lambda n: (max(n + head, -(-(blocks - n) // (stages - 1))), -n))
    base, more = divmod(blocks - last, stages - 1)
    return (*(base + (s < more) for s in range(stages - 1)), last)


def layer_cuts(shape: ModelShape, layout: Layout) -> list[int]:
    """Stage s holds layers [cuts[s], cuts[s+1]) of embedding, blocks, head. ValueError for more stages than layers."""
    counts = _counts(shape, layout)
    inner = list(itertools.accumulate(counts, initial=1))
    return [0, *inner[1:-1], shape.sizes.num_layers + 2]


def shares(shape: ModelShape, layout: Layout) -> list[Share]:
    """What each pipeline rank holds, in rank order. ValueError for more stages than layers."""
    return [_share(shape, layout, rank) for rank in range(layout.pp)]


def extremes(shape: ModelShape, layout: Layout) -> list[Share]:
    """The first rank's share, the second's and the last's: those between hold no more than the second, of fewer micro-batches."""
    return [_share(shape, layout, rank) for rank in sorted({0, min(1, layout.pp - 1), layout.pp - 1})]


def _share(shape: ModelShape, layout: Layout, rank: int) -> Share:
    counts = _counts(shape, layout)
    return Share(rank, rank == 0, counts[rank :: layout.pp], rank == layout.pp - 1)


def _counts(shape: ModelShape, layout: Layout) -> tuple[int, ...]:
    return block_counts(shape.sizes.num_layers, layout.stages, shape.head_flops(1) / shape.block_flops(1))
