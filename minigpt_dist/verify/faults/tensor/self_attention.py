"""Faults of tensor-parallel attention: which rank has which heads, and where their dropout draws from."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from minigpt_dist.verify.faults.catalogue import Names, fault
from minigpt_dist.verify.faults.layers import ALONE, Attention, cut


@fault(
    source="awslabs/slapo#46",
    needs="a fused projection",
    check="tensor.attention",
    stage="forward",
    tensor="output",
    green=("tensor.column", "tensor.row"),
    equivalent=ALONE,
)
def fused_qkv_cut_contiguously() -> Names:
    """The fused weight is cut into N runs of rows, and each rank takes its own for queries, keys and values."""

    class Wrong(Attention):
        def rows(self, qkv: Tensor) -> Tensor:
            return cut(qkv, self.rank, self.world_size)

    return {"ParallelAttention": Wrong}


@fault(
    source="huggingface/transformers, attention under a tensor-parallel plan: num_heads is the rank's, not the model's",
    needs="two ranks",
    check="tensor.attention",
    stage="forward",
    tensor="output",
    equivalent=ALONE,
)
def every_rank_cuts_its_share_into_all_heads() -> Names:
    """The model's number of heads is used for a rank's share of them: heads are N times too small."""

    class Wrong(Attention):
        def split(self, x: Tensor) -> Tensor:
            heads = x.shape[2] * self.world_size // self.size
            return x.view(*x.shape[:2], heads, -1).transpose(1, 2)

    return {"ParallelAttention": Wrong}


@fault(
    source="NVIDIA/Megatron-LM, tensor_parallel/random.py: what its own stream of every rank is for",
    needs="dropout in attention",
    check="tensor.dropout",
    stage="forward",
    green=("tensor.attention",),
    equivalent=ALONE,
)
def dropout_mask_alike_on_all_ranks() -> Names:
    """Heads of different ranks draw their masks from streams seeded alike."""

    class Wrong(Attention):
        def own_stream(self) -> int:
            return int(torch.randint(2**31, ()))

    return {"ParallelAttention": Wrong}


@fault(
    source="torch.manual_seed(seed + rank) inside a layer",
    needs="a number drawn after dropout",
    check="tensor.dropout",
    stage="forward",
    rank=1,
    green=("tensor.attention",),
    equivalent=ALONE,
)
def own_stream_stays_in_force() -> Names:
    """A rank seeds torch's stream for its masks, and leaves it so: what all ranks draw alike comes apart."""

    class Wrong(Attention):
        def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            torch.manual_seed(self.own_stream())
            dropout = self.dropout if self.training else 0.0
            return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)

    return {"ParallelAttention": Wrong}
