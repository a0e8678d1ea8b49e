"""Faults of what a fully sharded wrapper holds: views, whole gradients and moments, layers that were gathered and stay."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from minigpt_dist.verify.faults.catalogue import Names, fault
from minigpt_dist.verify.faults.sharded_wrapper import LessonFSDP, Piece


@fault(
    source="chunk() without clone()",
    needs="bytes of storages",
    check="fsdp.parameters",
    stage="memory",
    green=("fsdp.update",),
)
def fsdp_shard_is_a_view() -> Names:
    """A shard is a view into the whole parameter, which stays in memory."""

    class Wrapper(LessonFSDP):
        def part(self, whole: Tensor) -> Tensor:
            padded = torch.zeros(-(-whole.numel() // self.world_size) * self.world_size)
            padded[: whole.numel()] = whole.reshape(-1)
            return padded.chunk(self.world_size)[self.rank]

    return {"FullyShardedDataParallel": Wrapper}


@fault(
    source="an all-reduced gradient kept as a buffer",
    needs="bytes after the finish call",
    check="fsdp.gradients",
    stage="memory",
    green=("fsdp.update", "fsdp.peak"),
)
def fsdp_keeps_whole_gradients() -> Names:
    """The whole gradient stays beside the shard's."""

    class Wrapper(LessonFSDP):
        def reduce(self, piece: Piece) -> Tensor:
            mean = super().reduce(piece)
            piece.whole_gradient = piece.p.grad  # type: ignore[attr-defined]  # a note of the fault's own
            return mean

    return {"FullyShardedDataParallel": Wrapper}


@fault(
    source="the optimizer given whole parameters",
    needs="bytes of the optimizer's state",
    check="fsdp.moments",
    stage="memory",
    green=("fsdp.update", "fsdp.peak"),
)
def fsdp_shards_nothing() -> Names:
    """Each rank keeps everything: data parallelism under another name."""

    class Wrapper(LessonFSDP):
        def part(self, whole: Tensor) -> Tensor:
            return whole.reshape(-1).clone()

        def whole(self, piece: Piece) -> Tensor:
            return piece.shard.view(piece.shape)

    return {"FullyShardedDataParallel": Wrapper}


@fault(
    source="reshard_after_forward=False",
    needs="bytes after a forward",
    check="fsdp.freed",
    stage="memory",
    green=("fsdp.update", "fsdp.parameters"),
)
def fsdp_keeps_what_it_gathered() -> Names:
    """Gathered parameters stay from forward to backward."""

    class Wrapper(LessonFSDP):
        def after_forward(self, layer: nn.Module, out: Tensor) -> None:
            pass

    return {"FullyShardedDataParallel": Wrapper}


@fault(
    source="one unit for the whole model",
    needs="gathered bytes within a step",
    check="fsdp.peak",
    stage="memory",
    green=("fsdp.update", "fsdp.parameters", "fsdp.freed"),
)
def fsdp_gathers_everything_at_once() -> Names:
    """All layers are gathered before the first one runs."""

    class Wrapper(LessonFSDP):
        def forward(self, *args: Any, **options: Any) -> Any:
            for piece in self.pieces.values():
                self.gather(piece)
            return super().forward(*args, **options)

    return {"FullyShardedDataParallel": Wrapper}
