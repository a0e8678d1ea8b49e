"""Faults of tensor-parallel products: what is summed over ranks too often, too seldom, or not at all; who holds what."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from minigpt_dist.verify.faults.catalogue import Names, fault
from minigpt_dist.verify.faults.layers import ALONE, Column, Row, cut, pair, same, total


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
