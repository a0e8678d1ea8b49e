"""How long a step takes: compute by roofline, exchanges by bandwidth, the pipeline's bubble.

Owns the model of time. A block's products run at the rate that large ones reach, or at that of the memory; what lies between them reads and
writes memory (Williams et al. 2009, "Roofline"). The constants are in `cluster.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from minigpt_dist.layout import CHUNKS, Layout
from minigpt_dist.planner.cluster import HIDDEN, KERNEL_S, MATMUL, MEMORY, Cluster
from minigpt_dist.planner.communication import data_bytes, pipeline_bytes, tensor_bytes
from minigpt_dist.planner.memory import boundary_bytes
from minigpt_dist.planner.shape import ModelShape
from minigpt_dist.planner.stages import Share, extremes
from minigpt_dist.planner.techniques import OWN, Techniques, element_bytes, master_bytes

KERNELS = 12  # of a block's forward, the elementwise ones fused


@dataclass(frozen=True)
class Duration:
    """Seconds of one step: compute, exchange along each axis as far as it is not hidden, idle time of the pipeline, update."""

    compute: float
    dp: float
    tp: float
    pp: float
    bubble: float
    update: float

    @property
    def total(self) -> float:
        return self.compute + self.dp + self.tp + self.pp + self.bubble + self.update

    def to_dict(self) -> dict[str, float]:
        return {**self.__dict__, "total": self.total}


def bubble_fraction(layout: Layout) -> float:
    """Idle time of a pipeline over its ideal time: (pp - 1) / (chunks * M) (Narayanan et al. 2021, section 2.2)."""
    chunks = CHUNKS[layout.schedule] if layout.pp > 1 else 1
    return (layout.pp - 1) / (chunks * layout.micro_batches)


def duration(shape: ModelShape, layout: Layout, batch: int, cluster: Cluster, techniques: Techniques = OWN) -> Duration:
    """One step, paced by the pipeline rank whose micro-batch takes longest. ValueError for more stages than layers."""
    paced = [_busy(share, shape, layout, batch, cluster, techniques) for share in extremes(shape, layout)]
    compute, tp, pp, share = max(paced, key=lambda each: each[0] + each[1] + each[2])
    idle = bubble_fraction(layout) * (compute + tp + pp)
    sent = data_bytes(share, shape, layout, techniques) / cluster.bandwidth(layout, "dp")
    under = compute + tp if layout.zero_stage == 3 else 0.0
    exposed = max(sent - HIDDEN * under, (1 - HIDDEN) * sent) if under else sent
    return Duration(compute, exposed, tp, pp, idle, _update(share, shape, layout, cluster))


def _busy(
    share: Share, shape: ModelShape, layout: Layout, batch: int, cluster: Cluster, techniques: Techniques
) -> tuple[float, float, float, Share]:
    """Seconds of compute, tensor exchange and pipeline exchange of all micro-batches on one rank."""
    M = layout.micro_batches
    passes = 4 if layout.recompute else 3  # forward, backward for two products each, forward again
    block = block_seconds(shape, layout, batch, cluster, techniques)
    head = _products(shape.head_flops(batch), layout, cluster) if share.head else 0.0
    tp = tensor_bytes(share, shape, layout, batch, techniques) / cluster.bandwidth(layout, "tp")
    pp = pipeline_bytes(share, shape, layout, batch, techniques) / cluster.bandwidth(layout, "pp")
    return M * (passes * share.blocks * block + 3 * head), tp, pp, share


def block_seconds(shape: ModelShape, layout: Layout, batch: int, cluster: Cluster, techniques: Techniques) -> float:
    """Forward of one block on one rank, exchanges left out."""
    weights = shape.block_numel(layout.tp) * element_bytes(layout.precision)
    moved = weights + elementwise_bytes(shape, layout, batch, techniques)
    return (
        _products(shape.block_flops(batch), layout, cluster)
        + moved / (cluster.memory_bandwidth * MEMORY)
        + KERNELS * KERNEL_S
    )


def _products(flops: int, layout: Layout, cluster: Cluster) -> float:
    """Seconds of matrix products that are cut over tensor-parallel ranks. 32-bit ones are assumed to be as fast as the given peak."""
    return flops / layout.tp / (cluster.flops * MATMUL)


def elementwise_bytes(shape: ModelShape, layout: Layout, batch: int, techniques: Techniques) -> int:
    """What the operations between a block's products read and write: two LayerNorms (in and out), two residual additions (two in,
    one out), GELU, and where scores are stored, softmax and dropout over them."""
    sizes, t = shape.sizes, layout.tp
    spread = t if techniques.sequence_parallel else 1
    width = boundary_bytes(shape, layout, batch, Techniques(sequence_parallel=False))
    scores = 0 if techniques.fused_attention else 5 * batch * sizes.num_heads * sizes.seq_len**2 // t
    return 10 * width // spread + 2 * sizes.mlp_ratio * width // t + scores * element_bytes(layout.precision)


def _update(share: Share, shape: ModelShape, layout: Layout, cluster: Cluster) -> float:
    """Adam reads gradient, master copy and moments, and writes all but the gradient: seven numbers an element of the slice."""
    owned = share.numel(shape, layout) / (layout.dp if layout.zero_stage else 1)
    return 7 * owned * master_bytes(layout.precision) / (cluster.memory_bandwidth * MEMORY)
