"""Faults of tensor-parallel products and attention: what is summed over ranks too often, too seldom, or not at all; who holds what."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from minigpt_dist.verify.faults.catalogue import Names, fault
from minigpt_dist.verify.faults.layers import Attention, Column, Row, cut, pair, same, total

ALONE = ((1, "one rank holds everything"),)


@fault(
    source="vllm-project/vllm, RowParallelLinear: the bias belongs to rank 0 alone, or after the sum",
    needs="a bias",
    check="tensor.row",
    stage="forward",
    tensor="output",
    green=("tensor.column",),
    equivalent=ALONE,
)
def row_bias_added_once_a_rank() -> Names:
    """The bias is added before the sum over ranks, and counts N times."""

    class Wrong(Row):
        def forward(self, x: Tensor) -> Tensor:
            return self.leave(F.linear(x, self.weight, self.bias))

    return {"RowParallelLinear": Wrong}


@fault(
    source="replicated parameters whose gradients are summed though every rank has all of them",
    needs="the gradient of a row-parallel bias",
    check="tensor.row",
    stage="backward",
    tensor="gradient of bias",
    green=("tensor.column",),
    equivalent=ALONE,
)
def row_bias_gradient_summed_over_ranks() -> Names:
    """Every rank has the whole gradient of the bias, and they are added up."""

    class Wrong(Row):
        def forward(self, x: Tensor) -> Tensor:
            out = self.leave(F.linear(x, self.weight))
            return out if self.bias is None else out + pair(self.bias, same, total)

    return {"RowParallelLinear": Wrong}


@fault(
    source="Shoeybi et al. 2019, section 3: g is an all-reduce forward",
    needs="two ranks",
    check="tensor.row",
    stage="forward",
    tensor="output",
    equivalent=ALONE,
)
def row_product_is_not_summed() -> Names:
    """The all-reduce forward is left out: every rank goes on with a part of the sum."""

    class Wrong(Row):
        def leave(self, part: Tensor) -> Tensor:
            return part

    return {"RowParallelLinear": Wrong}


@fault(
    source="Shoeybi et al. 2019, section 3: the mean of what should be added",
    needs="two ranks",
    check="tensor.row",
    stage="forward",
    tensor="output",
    equivalent=ALONE,
)
def row_product_is_averaged() -> Names:
    """Parts of the sum are averaged over ranks."""

    class Wrong(Row):
        def leave(self, part: Tensor) -> Tensor:
            return super().leave(part) / self.world_size

    return {"RowParallelLinear": Wrong}


@fault(
    source="torch.distributed.nn.functional.all_reduce: its backward is a sum over ranks too",
    needs="a gradient behind a row-parallel product",
    check="tensor.row",
    stage="backward",
    tensor="gradient of the input",
    equivalent=ALONE,
)
def row_all_reduce_done_again_in_backward() -> Names:
    """Gradients, whole on every rank, are summed over ranks on the way back too."""

    class Wrong(Row):
        def leave(self, part: Tensor) -> Tensor:
            return pair(part, total, total)

    return {"RowParallelLinear": Wrong}


@fault(
    source="Shoeybi et al. 2019, section 3: f is an all-reduce backward",
    needs="the gradient of a column-parallel product's input",
    check="tensor.column",
    stage="backward",
    tensor="gradient of the input",
    green=("tensor.row", "tensor.embedding"),
    equivalent=ALONE,
)
def column_input_gradient_not_summed() -> Names:
    """The all-reduce backward is left out: what lies before gets each rank's part of its gradient."""

    class Wrong(Column):
        def enter(self, x: Tensor) -> Tensor:
            return x

    return {"ColumnParallelLinear": Wrong}


@fault(
    source="an all-reduce of an input that is the same on all ranks",
    needs="two ranks",
    check="tensor.column",
    stage="forward",
    tensor="output",
    equivalent=ALONE,
)
def column_input_summed_forward() -> Names:
    """The input, equal on all ranks, is summed over ranks on the way in, as it should be on the way back."""

    class Wrong(Column):
        def enter(self, x: Tensor) -> Tensor:
            return pair(x, total, total)

    return {"ColumnParallelLinear": Wrong}


@fault(
    source="a bias left whole beside a weight that is cut",
    needs="a rank that is not the first",
    check="tensor.column",
    stage="model",
    rank=1,
    tensor="bias",
    equivalent=ALONE,
)
def column_bias_is_the_first_ranks() -> Names:
    """Every rank adds the first slice of the bias."""

    class Wrong(Column):
        def part(self, whole: Tensor) -> Tensor:
            return cut(whole, 0 if whole.dim() == 1 else self.rank, self.world_size)

    return {"ColumnParallelLinear": Wrong}


@fault(
    source="modelscope/ms-swift#7944",
    needs="a rank that is not the first",
    check="tensor.column",
    stage="model",
    rank=1,
    tensor="weight",
    green=("tensor.row", "tensor.embedding"),
    equivalent=ALONE,
)
def tp_shards_initialised_identically() -> Names:
    """All ranks start from the same part of the weights, as from one seed."""

    class Wrong(Column):
        def part(self, whole: Tensor) -> Tensor:
            return cut(whole, 0, self.world_size)

    return {"ColumnParallelLinear": Wrong}


@fault(
    source="Shoeybi et al. 2019, section 3: what is sent are activations",
    needs="a count of bytes",
    check="tensor.traffic",
    stage="forward",
    green=("tensor.column", "tensor.tied"),
    equivalent=ALONE,
)
def weights_are_gathered_for_every_product() -> Names:
    """Every rank collects the whole weight, and computes its columns of the whole product: right, and nothing is saved."""

    class Wrong(Column):
        def forward(self, x: Tensor) -> Tensor:
            if self.world_size > 1:
                dist.all_gather([torch.empty_like(self.weight) for _ in range(self.world_size)], self.weight.detach())
            return super().forward(x)

    return {"ColumnParallelLinear": Wrong}


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
