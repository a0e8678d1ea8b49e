"""Random streams under tensor parallelism: equal on all ranks of an axis outside of its regions, each rank's own inside.

Owns where a rank's own numbers come from. Torch's default stream is the shared one: seeded alike on all ranks of the axis (and
otherwise on other replicas), it stays in step, because every rank draws from it alike.

A rank's own stream has no state that lasts. It is seeded by one number from the shared stream, and by the rank; so whatever saves and
puts back the shared stream (a checkpoint, recomputation) has saved the others too, on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from minigpt_dist.parallel.tensor.axis import TensorAxis


@contextmanager
def rank_stream(axis: TensorAxis, device: torch.device, drawn: bool = True) -> Iterator[None]:
    """Inside, random numbers are this rank's own; outside, the shared stream goes on one number later, on all ranks alike.

    drawn: whether any will be drawn; if not, nothing happens.
    """
    if not drawn:
        yield
        return
    seed = int(torch.randint(2**62, ()))
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed + axis.rank)
        yield


class RankDropout(nn.Module):
    """Dropout of activations that differ between ranks, such as slices of the sequence: each rank draws a mask of its own."""

    def __init__(self, p: float, axis: TensorAxis) -> None:
        super().__init__()
        self.p, self.axis = p, axis

    def forward(self, x: Tensor) -> Tensor:
        with rank_stream(self.axis, x.device, drawn=self.training and self.p > 0):
            return F.dropout(x, self.p, self.training)
