"""The global norm: the mean gradient's 2-norm over the slices of all ranks, as torch.nn.utils.clip_grad_norm_ has it on one process.

Owns what counts in the norm. Leaves the slices to the optimizer, who holds one replica to `model_axis.py`, and what is done with the norm
to `clipping.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from minigpt_dist.parallel.collectives import Group, all_reduce_sum
from minigpt_dist.parallel.model_axis import ModelAxis
from minigpt_dist.parallel.stages.shard import Shard


class GlobalNorm:
    """Norms over the data ranks of `group`, and over the ranks of `model_axis` where a replica is cut too.

    device: where sums are exchanged, which is where the backend can reach them.
    """

    def __init__(self, group: Group, model_axis: ModelAxis | None, device: torch.device) -> None:
        self.group, self.model_axis, self.device = group, model_axis, device

    def sum(self, value: float) -> float:
        """`value` summed over all those ranks, in float64. All of them together."""
        total = all_reduce_sum(torch.tensor(value, dtype=torch.float64, device=self.device), self.group)
        return float(total if self.model_axis is None else self.model_axis.sum(total))

    def own_sq(self, shards: Sequence[Shard], grads: Sequence[Tensor]) -> float:
        """Squared 2-norm of this rank's slices, without what another rank of the replica counts."""
        parts = [p for shard, grad in zip(shards, grads, strict=True) for p in self._counted(shard, grad)]
        return sum(float(torch.linalg.vector_norm(part, dtype=torch.float64)) ** 2 for part in parts)

    def _counted(self, shard: Shard, grad: Tensor) -> list[Tensor]:
        if self.model_axis is None:
            return [grad]
        return [grad[lo:hi] for i, lo, hi in shard.owned if self.model_axis.counts(shard.flat.params[i])]
