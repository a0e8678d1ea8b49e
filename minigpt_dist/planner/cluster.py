"""The machines: how much memory, how fast.

Owns the numbers, and how much of each is reached in practice, with where that is known from.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from minigpt_dist.layout import Layout
from minigpt_dist.require import require, require_count

# Shares of the peak that large products and long messages reach. Fitted to the twelve rows of Narayanan et al. 2021, "Efficient large-scale
# language model training on GPU clusters using Megatron-LM", table 2 (A100, NVLink, 200 Gb/s a GPU), none of them to one row.
MATMUL, MEMORY, INTRA_NODE, INTER_NODE = 0.74, 0.8, 0.75, 0.75
KERNEL_S = 5e-6  # seconds that a kernel takes to start
HIDDEN = 0.6  # of the compute that stage 3's exchange can run under


@dataclass(frozen=True)
class Cluster:
    """gpus devices, gpus_per_node in a node. The defaults are a DGX A100's.

    memory: bytes a device, of which `reserve` (a share) is left to the allocator, the context and the libraries. flops: a second, of one
    device at its peak. Bandwidths: bytes a second that one device can send, within its node and out of it, or move to and from its memory.

    ValueError for numbers that no machine has.
    """

    gpus: int
    memory: float
    gpus_per_node: int = 8
    intra_node: float = 300e9
    inter_node: float = 25e9
    flops: float = 312e12
    memory_bandwidth: float = 2.0e12
    reserve: float = 0.1

    def __post_init__(self) -> None:
        for name in ("gpus", "gpus_per_node"):
            require_count(name, getattr(self, name))
        for name in ("memory", "intra_node", "inter_node", "flops", "memory_bandwidth"):
            value = getattr(self, name)
            require(value > 0 and math.isfinite(value), name, value, "a finite number above 0")
        require(0 <= self.reserve < 1, "reserve", self.reserve, "in [0, 1)")

    @property
    def usable(self) -> float:
        """Bytes a device for the job's own tensors."""
        return self.memory * (1 - self.reserve)

    def bandwidth(self, layout: Layout, axis: str) -> float:
        """Bytes a second along "dp", "tp" or "pp" as they are reached: a node's own where no group of the axis has ranks in two nodes.

        Tensor-parallel ranks sit next to each other, stages farthest apart, as in `parallel/mesh.py`.
        """
        extent = {"tp": layout.tp, "dp": layout.tp * layout.dp, "pp": layout.world_size}[axis]
        inside = self.gpus_per_node % extent == 0
        return self.intra_node * INTRA_NODE if inside else self.inter_node * INTER_NODE
