"""Flat buffers: parameters and gradients of a model as views into one vector each.

Owns the map between a parameter and its place in the vector, and the knowledge of which parameters received a gradient.
Leaves what a rank does with its slice, and every exchange, to `stages/`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn


def even_bounds(total: int, parts: int) -> list[int]:
    """Cuts [0, c, 2c, ..., parts*c] with c = ceil(total / parts): the padded, even partition of ZeRO."""
    chunk = -(-total // parts)
    return [r * chunk for r in range(parts + 1)]


class FlatLayout:
    """Where parameters of one dtype and device lie in a vector, end to end in the order given, zero-padded to a multiple of `parts`.

    Rank r owns elements [bounds[r], bounds[r+1]); parameter i is elements [offsets[i], offsets[i] + numels[i]).
    """

    def __init__(self, params: Sequence[nn.Parameter], parts: int) -> None:
        self.params = list(params)
        self.numels = [p.numel() for p in self.params]
        self.total = sum(self.numels)
        self.bounds = even_bounds(self.total, parts)
        self.padded = self.bounds[-1]
        self.offsets = [sum(self.numels[:i]) for i in range(len(self.numels))]
        self.dtype, self.device = self.params[0].dtype, self.params[0].device

    def cuts(self, lo: int, hi: int) -> list[int]:
        """The bounds of ranks within elements [lo, hi), counted from lo: rank r's part of these is [cuts[r], cuts[r+1])."""
        return [min(max(bound, lo), hi) - lo for bound in self.bounds]

    def pieces(self, lo: int, hi: int) -> Iterator[tuple[int, int, int]]:
        """(parameter index, start, stop) of every non-empty piece of a parameter in elements [lo, hi), counted from lo."""
        for i, (offset, numel) in enumerate(zip(self.offsets, self.numels, strict=True)):
            start, stop = max(offset, lo), min(offset + numel, hi)
            if start < stop:
                yield i, start - lo, stop - lo


class FlatParameters(FlatLayout):
    """After construction each parameter's `data` is a view into `data`, 1-D of `padded` elements."""

    def __init__(self, params: Sequence[nn.Parameter], parts: int) -> None:
        super().__init__(params, parts)
        self.data = torch.zeros(self.padded, dtype=self.dtype, device=self.device)
        self._data_views = [self._view(self.data, i) for i in range(len(self.params))]
        for p, view in zip(self.params, self._data_views, strict=True):
            view.copy_(p.detach())
            p.data = view

    def _view(self, flat: Tensor, i: int) -> Tensor:
        return flat[self.offsets[i] : self.offsets[i] + self.numels[i]].view(self.params[i].shape)

    def check_views(self) -> None:
        """Raise ValueError if a parameter's memory was replaced (`.to()`, `.data = ...`) since construction."""
        for i, (p, view) in enumerate(zip(self.params, self._data_views, strict=True)):
            require_in_place(i, p, view)


def require_in_place(i: int, p: nn.Parameter, view: Tensor) -> None:
    """Raise ValueError unless the memory of `p`, parameter i of an optimizer, is still that of `view`."""
    if p.data_ptr() != view.data_ptr() or p.dtype != view.dtype:
        raise ValueError(
            f"parameter {i} (shape {tuple(p.shape)}, {p.dtype}) no longer lives in the optimizer's flat buffer, "
            "but should: move or cast a model before building its optimizer"
        )


class FlatBuffer(FlatParameters):
    """Flat parameters, and their gradients too: each parameter's `grad` is a view into `grad`, 1-D of `padded` elements.

    So backward writes straight into the vector that is exchanged.

    A gradient view is cut from a `.data` alias: it then has a version counter of its own, which backward (adding in place)
    moves. That is how `mark_absent` tells a parameter that took part from one that did not, without a hook.
    """

    def __init__(self, params: Sequence[nn.Parameter], parts: int) -> None:
        super().__init__(params, parts)
        self.grad = torch.zeros_like(self.data)
        self._grad_views = [self._view(self.grad, i).data for i in range(len(self.params))]
        # A gradient computed before its parameter had a place here is still to be used.
        waiting = [p.grad for p in self.params]
        self.zero_grad()
        for p, grad in zip(self.params, waiting, strict=True):
            p.grad = p.grad if grad is None else grad

    def zero_grad(self) -> None:
        """Zero every gradient in place and point each parameter's `grad` at its view again."""
        self.grad.zero_()
        for p, view in zip(self.params, self._grad_views, strict=True):
            if p.grad is not view:
                p.grad = view
        self._versions = [view._version for view in self._grad_views]

    def present(self) -> list[bool]:
        """Per parameter: has it received a gradient since `zero_grad`?"""
        return [
            p.grad is not None and (p.grad is not view or view._version != seen)
            for p, view, seen in zip(self.params, self._grad_views, self._versions, strict=True)
        ]

    def collect(self) -> None:
        """Bring gradients that were put elsewhere (`p.grad = tensor`, `create_graph=True`) into the flat vector."""
        for p, view in zip(self.params, self._grad_views, strict=True):
            if p.grad is not None and p.grad is not view:
                view.copy_(p.grad)
                view.add_(0.0)  # turns -0.0 into 0.0: minus zero is kept for `mark_absent`
                p.grad = view

    def mark_absent(self, flat: Tensor, present: Sequence[bool], mark: float) -> None:
        """Write `mark` into `flat` over every parameter without a gradient: -0.0 before an exchange, 0.0 after it.

        A gradient accumulated into a zeroed buffer is never -0.0 (0.0 + -0.0 is 0.0), and a sum of -0.0 over ranks is
        -0.0 only if every rank sent it. So the sum itself tells the owner of a slice whether *any* rank used the parameter.
        """
        for i, used in enumerate(present):
            if not used:
                self._view(flat, i).fill_(mark)
