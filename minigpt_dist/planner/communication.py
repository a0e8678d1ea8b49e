"""Bytes that one rank sends in a step, by axis: data, tensor, pipeline.

Owns the volumes, exact for what this package does: the payload that leaves a rank, its own slice not counted. Leaves how long they take
to `duration.py`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from minigpt_dist.layout import Layout
from minigpt_dist.planner.memory import boundary_bytes
from minigpt_dist.planner.shape import ModelShape
from minigpt_dist.planner.stages import Share, extremes
from minigpt_dist.planner.techniques import OWN, Techniques, element_bytes, master_bytes


@dataclass(frozen=True)
class Communication:
    """Bytes sent a step along each axis, by the pipeline rank that sends most of all."""

    dp: int
    tp: int
    pp: int

    @property
    def total(self) -> int:
        return self.dp + self.tp + self.pp

    def to_dict(self) -> dict[str, int]:
        return asdict(self)


def communication(shape: ModelShape, layout: Layout, batch: int, techniques: Techniques = OWN) -> Communication:
    """The pipeline rank that sends most; `batch` sequences a micro-batch. ValueError for more stages than layers."""
    found = [communication_of(share, shape, layout, batch, techniques) for share in extremes(shape, layout)]
    return max(found, key=lambda each: each.total)


def communication_of(
    share: Share, shape: ModelShape, layout: Layout, batch: int, techniques: Techniques
) -> Communication:
    """One pipeline rank's."""
    return Communication(
        dp=data_bytes(share, shape, layout, techniques),
        tp=tensor_bytes(share, shape, layout, batch, techniques),
        pp=pipeline_bytes(share, shape, layout, batch, techniques),
    )


def data_bytes(share: Share, shape: ModelShape, layout: Layout, techniques: Techniques) -> int:
    """A reduce-scatter of gradients and an all-gather of parameters, or both of gradients under stage 0; of stage 3, the mean over ranks.

    Stages 0 to 2 move what an all-reduce moves, stage 3 half as much again (Rajbhandari et al. 2020, section 7): it collects parameters
    once for forward and once for backward, but for the last unit's, which are still there.
    """
    N, M, numel = layout.dp, layout.micro_batches, share.numel(shape, layout)
    e, master = element_bytes(layout.precision), master_bytes(layout.precision)
    if N == 1:
        return 0
    sent = (N - 1) * -(-numel // N)  # elements that one reduce-scatter, or one all-gather, takes
    gradients = sent * (master if techniques.sum_in_master else e)
    if layout.zero_stage == 0:
        return 2 * gradients
    if layout.zero_stage >= 2 and techniques.sum_each:
        gradients *= M
    if layout.zero_stage < 3:
        return gradients + sent * e
    last = shape.head_numel(layout) if share.head else shape.block_numel(layout.tp)
    return gradients + M * e * (N - 1) * (2 * numel - last) // N


def tensor_bytes(share: Share, shape: ModelShape, layout: Layout, batch: int, techniques: Techniques) -> int:
    """A ring all-reduce of b s h elements after attention and after the MLP, in forward, backward and recomputation (Shoeybi et al.
    2019, section 3); one for the embedding, one for the head's input, and three numbers a token for the loss.

    Cut over the sequence, an all-gather and a reduce-scatter move as much as the all-reduce (Korthikanti et al. 2022, section 4.2.2).
    """
    t, sizes = layout.tp, shape.sizes
    if t == 1:
        return 0
    tokens = batch * sizes.seq_len
    whole = tokens * sizes.embed_dim * element_bytes(layout.precision)
    calls = share.blocks * (6 if layout.recompute else 4) + share.embedding + share.head
    loss = 3 * tokens * 4 if share.head else 0
    return layout.micro_batches * (2 * (t - 1) * (calls * whole + loss) // t)


def pipeline_bytes(share: Share, shape: ModelShape, layout: Layout, batch: int, techniques: Techniques) -> int:
    """The tensor between two stages, forward to the next and its gradient to the one before; of a tied embedding's two copies, one
    gradient each way a step (Narayanan et al. 2021, section 3.2)."""
    if layout.pp == 1:
        return 0
    neighbours = 2 * len(share.stages) - share.embedding - share.head
    tensors = layout.micro_batches * neighbours * boundary_bytes(shape, layout, batch, techniques)
    tied = shape.sizes.tie_head and (share.embedding or share.head)
    return tensors + (shape.vocab_numel(layout) * master_bytes(layout.precision) if tied else 0)
