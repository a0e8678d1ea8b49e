"""Stages 2 and 3 of ZeRO as optimizers of their own: the names by which the suite judges them.

Owns the two constructors. Leaves all work to `zero.py`, whose options they share but for the stage.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from minigpt_dist.parallel.zero import ZeroOptimizer


class Zero2Optimizer(ZeroOptimizer):
    """Stage 2: of gradients too, a rank keeps its slice alone. Arguments, errors and bits as `ZeroOptimizer`'s."""

    def __init__(self, module: nn.Module, world_size: int, rank: int, **options: Any) -> None:
        super().__init__(module, world_size, rank, **options, stage=2)


class Zero3Optimizer(ZeroOptimizer):
    """Stage 3: of parameters too. They are whole while their module runs, and inside of `gathered`."""

    def __init__(self, module: nn.Module, world_size: int, rank: int, **options: Any) -> None:
        super().__init__(module, world_size, rank, **options, stage=3)
