"""An eleventh host for faults: a correct fully sharded wrapper, every parameter a padded piece of its flat vector.

Hooks gather a layer's parameters before its forward and before its backward. What autograd saved are views of them: between uses their
memory is given back.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Piece:
    """One parameter: its shape, this rank's shard, and the memory that the whole of it has while it is used."""

    def __init__(self, p: nn.Parameter, shard: Tensor) -> None:
        self.p, self.shape, self.shard, self.full = p, p.shape, shard, torch.empty_like(p.data)
        self.before: Tensor | None = None  # the shard's gradient, from earlier backwards
        self.full.untyped_storage().resize_(0)
        p.data = shard

    @property
    def there(self) -> bool:
        return self.full.untyped_storage().size() > 0


class LessonFSDP(nn.Module):
    """Rank 0's parameters at construction; after `finish_gradient_synchronization` each shard has its part of the mean gradient."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.start()
        self.pieces: dict[Tensor, Piece] = {}
        for p in module.parameters():
            self.add(p)
        for layer in module.modules():
            if layer._parameters:
                layer.register_forward_pre_hook(lambda layer, _: self.gather_all(layer))
                layer.register_forward_hook(lambda layer, _, out: self.after_forward(layer, out))

    def start(self) -> None:
        for p in self.module.parameters():
            dist.broadcast(p.data, src=0)

    def add(self, p: nn.Parameter) -> None:
        self.pieces[p] = Piece(p, self.part(p.data))
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(self.on_grad)

    def part(self, whole: Tensor) -> Tensor:
        """This rank's piece of `whole`, flat and padded, in memory of its own."""
        size = -(-whole.numel() // self.world_size)
        padded = whole.new_zeros(size * self.world_size)
        padded[: whole.numel()] = whole.reshape(-1)
        return padded[self.rank * size :][:size].clone()

    def whole(self, piece: Piece) -> Tensor:
        parts = [torch.empty_like(piece.shard) for _ in range(self.world_size)]
        dist.all_gather(parts, piece.shard)
        return torch.cat(parts)[: piece.shape.numel()].view(piece.shape)

    def gather_all(self, layer: nn.Module) -> None:
        for p in layer._parameters.values():
            if p is not None:
                self.gather(self.pieces[p])

    def gather(self, piece: Piece) -> None:
        if not piece.there:
            piece.full.untyped_storage().resize_(piece.full.numel() * piece.full.element_size())
            piece.full.copy_(self.whole(piece))
            piece.before, piece.p.grad = piece.p.grad, None
            piece.p.data = piece.full

    def free(self, piece: Piece) -> None:
        piece.p.data = piece.shard
        piece.full.untyped_storage().resize_(0)
        if piece.before is not None:
            piece.p.grad, piece.before = piece.before, None

    def after_forward(self, layer: nn.Module, out: Tensor) -> None:
        for p in layer._parameters.values():
            if p is not None:
                self.free(self.pieces[p])
        if out.requires_grad:
            out.register_hook(lambda grad: self.gather_all(layer))

    def on_grad(self, p: Tensor) -> None:
        piece = self.pieces[p]
        mean = self.reduce(piece)
        before, piece.before, p.grad = piece.before, None, None
        self.free(piece)
        p.grad = self.added(before, mean)

    def added(self, before: Tensor | None, mean: Tensor) -> Tensor:
        return mean if before is None else before + mean

    def reduce(self, piece: Piece) -> Tensor:
        """This rank's part of the mean of the whole gradient."""
        assert piece.p.grad is not None
        total = piece.p.grad.contiguous()
        dist.all_reduce(total)
        return self.part(total) / self.world_size

    def forward(self, *args: Any, **options: Any) -> Any:
        return self.module(*args, **options)

    def finish_gradient_synchronization(self) -> None:
        for piece in self.pieces.values():
            if piece.there:
                self.free(piece)

    @torch.no_grad()
    def gather_full_params(self) -> dict[str, Tensor]:
        return {name: self.whole(self.pieces[p]) for name, p in self.module.named_parameters()}


NAMES = {"FullyShardedDataParallel": LessonFSDP}
