"""Faults of reduce-scatter and all-gather: whose part is returned, and in which order parts are joined."""

from __future__ import annotations

import torch
from torch import Tensor

from minigpt_dist.verify.faults import ring
from minigpt_dist.verify.faults.catalogue import Names, fault
from minigpt_dist.verify.faults.ring import LessonRing


@fault(
    source="deepspeedai/DeepSpeed#5283, slices in another order than ranks",
    needs="two ranks",
    check="collectives.reduce_scatter",
    stage="reduce",
    rank=0,
    green=("collectives.all_reduce",),
)
def reduce_scatter_returns_the_neighbours_slice() -> Names:
    """The sum that a rank returns is the next rank's slice."""

    def reduce_scatter(tensor: Tensor) -> Tensor:
        path, summed = LessonRing(), tensor.clone()
        path.all_reduce(summed)
        return path.slices(summed)[(path.rank + 1) % path.world_size].clone()

    return {"reduce_scatter": reduce_scatter}


@fault(
    source="in-place reduction of the caller's buffer",
    needs="a look at the input afterwards",
    check="collectives.reduce_scatter",
    stage="reduce",
    rank=0,
)
def reduce_scatter_overwrites_its_input() -> Names:
    """Partial sums are left in the tensor that was given."""

    def reduce_scatter(tensor: Tensor) -> Tensor:
        path = LessonRing()
        path.reduce_scatter(tensor)
        return path.slices(tensor)[path.rank].clone()

    return {"reduce_scatter": reduce_scatter}


@fault(
    source="all_gather of uneven shards, padded",
    needs="ranks that bring different lengths",
    check="collectives.all_gather",
    stage="gather",
    rank=0,
)
def gather_keeps_the_padding() -> Names:
    """Parts are padded to the longest, and the padding is not cut off again."""

    def all_gather(tensor: Tensor) -> Tensor:
        longest = max(ring.lengths_of(tensor, LessonRing()))
        return ring.all_gather(torch.cat([tensor, tensor.new_zeros(longest - tensor.numel())]))

    return {"all_gather": all_gather}


@fault(
    source="deepspeedai/DeepSpeed#5283",
    needs="two ranks",
    check="collectives.all_gather",
    stage="gather",
    rank=1,
    green=("collectives.all_reduce",),
)
def gather_begins_with_the_own_part() -> Names:
    """Parts are joined in the order in which they arrive, the rank's own first."""

    def all_gather(tensor: Tensor) -> Tensor:
        path = LessonRing()
        ends = torch.tensor(ring.lengths_of(tensor, path)).cumsum(0).tolist()
        parts = ring.all_gather(tensor).tensor_split(ends[:-1])
        return torch.cat([parts[(path.rank - k) % path.world_size] for k in range(path.world_size)])

    return {"all_gather": all_gather}
