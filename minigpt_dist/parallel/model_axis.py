"""The ranks over which one replica of the model is cut: what an optimizer that works along the data axis must know of the others.

Owns that a parameter which several ranks of a replica hold counts once in a norm. Leaves who holds what to the tensor and pipeline
pieces.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from minigpt_dist.parallel.collectives import Group, all_reduce_sum


class ModelAxis:
    """The ranks of `group` hold one replica between them.

    elsewhere: parameters of this rank that another rank of the group holds too, and counts: of each, all ranks but one name it here
    (LayerNorm weights under tensor parallelism, a tied weight's second copy under a pipeline).
    """

    def __init__(self, group: Group, elsewhere: Iterable[nn.Parameter] = ()) -> None:
        self.group, self._elsewhere = group, {id(p): p for p in elsewhere}

    def counts(self, p: nn.Parameter) -> bool:
        """Does this rank's copy of `p` count?"""
        return id(p) not in self._elsewhere

    def sum(self, value: Tensor) -> Tensor:
        """`value` summed over the replica's ranks, in place, and returned."""
        return all_reduce_sum(value, self.group)
