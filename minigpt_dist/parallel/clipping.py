"""Clipping by the global norm: the mean gradient's 2-norm over the slices of all ranks, as torch.nn.utils.clip_grad_norm_ has it.

Owns what counts in the norm, and that all ranks scale alike. Leaves the slices to the optimizer, and who holds one replica to
`model_axis.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from minigpt_dist.parallel.collectives import Group, all_reduce_sum
from minigpt_dist.parallel.model_axis import ModelAxis
from minigpt_dist.parallel.stages.shard import Shard

EPS = 1e-6  # torch's: keeps a norm of 0 from dividing


class GlobalNorm:
    """Norms over the data ranks of `group`, and over the ranks of `model_axis` where a replica is cut too."""

    def __init__(self, group: Group, model_axis: ModelAxis | None) -> None:
        self.group, self.model_axis = group, model_axis

    def sum(self, value: float) -> float:
        """`value` summed over all those ranks, in float64. All of them together."""
        total = all_reduce_sum(torch.tensor(value, dtype=torch.float64), self.group)
        return float(total if self.model_axis is None else self.model_axis.sum(total))

    def own_sq(self, shards: Sequence[Shard], grads: Sequence[Tensor]) -> float:
        """Squared 2-norm of this rank's slices, without what another rank of the replica counts."""
        parts = [p for shard, grad in zip(shards, grads, strict=True) for p in self._counted(shard, grad)]
        return sum(float(torch.linalg.vector_norm(part, dtype=torch.float64)) ** 2 for part in parts)

    def clip_(self, grads: Iterable[Tensor], own_sq: float, max_norm: float) -> None:
        """Scale `grads`, in place, so that the norm over all ranks is at most `max_norm`."""
        scale = min(max_norm / (self.sum(own_sq) ** 0.5 + EPS), 1.0)
        for grad in grads:
            grad.mul_(scale)

    def _counted(self, shard: Shard, grad: Tensor) -> list[Tensor]:
        if self.model_axis is None:
            return [grad]
        return [grad[lo:hi] for i, lo, hi in shard.owned if self.model_axis.counts(shard.flat.params[i])]
