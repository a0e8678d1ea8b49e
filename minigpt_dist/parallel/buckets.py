"""Buckets: gradients gathered into few large messages, in the order in which backward produces them.

Owns which parameter's gradient lies where. Leaves when a bucket is exchanged, and how, to `data_parallel.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

FIRST_BUCKET_BYTES = 2**20  # small, so that the first exchange starts early in backward


class Bucket:
    """The gradients of some parameters of one dtype and device, end to end in one vector, each parameter's `grad` a view of it.

    A number a parameter follows them: 1 where this rank's backward has reached it since the last exchange, so that the sum over
    ranks tells on how many ranks that was.
    """

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self.params = list(params)
        numels = [p.numel() for p in self.params]
        total = sum(numels)
        self.flat = torch.zeros(total + len(numels), dtype=self.params[0].dtype, device=self.params[0].device)
        self.views = [v.view(p.shape) for v, p in zip(self.flat[:total].split(numels), self.params, strict=True)]
        self.reached = [False] * len(numels)
        self._marks = self.flat[total:]
        self._kept: dict[int, Tensor] = {}

    def adopt(self, i: int) -> None:
        """Backward has reached parameter i: bring its gradient, wherever it is, into the vector, and let `grad` be the view again."""
        grad, view = self.params[i].grad, self.views[i]
        if grad is not None and grad is not view:
            view.copy_(grad)
            self.params[i].grad = view
        self.reached[i] = True

    def prepare(self) -> None:
        """Make the vector ready to be summed: no gradient counts as zero, and what may have to be put back is kept."""
        for i, (p, view) in enumerate(zip(self.params, self.views, strict=True)):
            if p.grad is None:  # never reached, or thrown away since
                self.reached[i] = False
                view.zero_()
                continue
            if p.grad is not view:
                view.copy_(p.grad)
                p.grad = view
            if not self.reached[i]:
                self._kept[i] = view.clone()
        self._marks.copy_(torch.tensor(self.reached))

    def settle(self, world_size: int) -> None:
        """Turn the sum over ranks into the mean; a parameter that no rank reached has its own gradient back, or none."""
        reached = (self._marks > 0).tolist()
        self.flat.div_(world_size)
        for i, (p, view) in enumerate(zip(self.params, self.views, strict=True)):
            if reached[i]:
                p.grad = view
            elif i in self._kept:
                view.copy_(self._kept[i])
        self._kept.clear()
        self.reached = [False] * len(self.params)


def assign(params: Sequence[nn.Parameter], limit: int) -> list[list[int]]:
    """Indices into `params`, bucket by bucket: reversed order (backward's), one dtype and device each, at most `limit` bytes or one tensor.

    The first bucket holds at most FIRST_BUCKET_BYTES.
    """
    buckets: list[list[int]] = []
    open_ones: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for i in reversed(range(len(params))):
        p = params[i]
        bucket = open_ones.get((p.dtype, p.device))
        room = FIRST_BUCKET_BYTES if bucket is not None and bucket is buckets[0] else limit
        if bucket is None or _nbytes(params, bucket) + p.nbytes > min(room, limit):
            bucket = open_ones[p.dtype, p.device] = []
            buckets.append(bucket)
        bucket.append(i)
    return buckets


def _nbytes(params: Sequence[Tensor], indices: Sequence[int]) -> int:
    return sum(params[i].nbytes for i in indices)
