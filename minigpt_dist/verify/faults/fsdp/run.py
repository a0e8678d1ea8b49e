"""Faults of a fully sharded wrapper that a whole run shows: stale and drifting parameters, hidden state, lists that grow."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from minigpt_dist.verify.faults.catalogue import Names, fault
from minigpt_dist.verify.faults.sharded_wrapper import LessonFSDP, Piece


@fault(
    source="prefetched weights that were gathered before the update",
    needs="several updates",
    check="fsdp.oracle",
    stage="forward",
)
def fsdp_uses_last_steps_parameters() -> Names:
    """Forward and backward use parameters that were gathered before the last update."""

    class Wrapper(LessonFSDP):
        def gather(self, piece: Piece) -> None:
            before, there = getattr(piece, "prefetched", None), piece.there
            super().gather(piece)
            if not there and torch.is_grad_enabled() and not torch._C._current_autograd_node():
                piece.prefetched = piece.full.clone()  # type: ignore[attr-defined]  # a note of the fault's own
            if before is not None and not there:
                piece.full.copy_(before)

    return {"FullyShardedDataParallel": Wrapper}


@fault(
    source="norms called too small to reduce",
    needs="norms that are not cut",
    check="fsdp.norms",
    stage="gather",
    rank=1,
)
def fsdp_norms_drift() -> Names:
    """Vectors stay whole on every rank, and each rank moves them by its own gradient."""

    class Wrapper(LessonFSDP):
        def part(self, whole: Tensor) -> Tensor:
            return whole.clone() if whole.dim() == 1 else super().part(whole)

        def whole(self, piece: Piece) -> Tensor:
            return piece.shard.clone() if len(piece.shape) == 1 else super().whole(piece)

        def reduce(self, piece: Piece) -> Tensor:
            assert piece.p.grad is not None
            return piece.p.grad if len(piece.shape) == 1 else super().reduce(piece)

    return {"FullyShardedDataParallel": Wrapper}


@fault(source="error feedback that is not saved", needs="a resume", check="fsdp.resume", stage="optimizer")
def fsdp_hides_a_residual() -> Names:
    """What a rounded gradient leaves over is added to the next one, and no state has it."""

    class Wrapper(LessonFSDP):
        def reduce(self, piece: Piece) -> Tensor:
            exact = super().reduce(piece) + getattr(piece, "residual", 0.0)
            rounded = exact.bfloat16().float()
            piece.residual = exact - rounded  # type: ignore[attr-defined]  # a note of the fault's own
            return rounded

    return {"FullyShardedDataParallel": Wrapper}


@fault(source="a list of handles that nobody empties", needs="several steps", check="fsdp.live", stage="memory")
def fsdp_keeps_every_handle() -> Names:
    """A list of reduced gradients grows by a step's each step."""

    class Wrapper(LessonFSDP):
        def reduce(self, piece: Piece) -> Tensor:
            mean = super().reduce(piece)
            self.handles = [*getattr(self, "handles", []), mean]
            return mean.clone()

    return {"FullyShardedDataParallel": Wrapper}


@fault(source="rank 0 alone checks", needs="collectives by rank", check="fsdp.order", stage="reduce", rank=1)
def fsdp_rank_0_reduces_in_two_parts() -> Names:
    """Rank 0 and the others reduce the same gradient under different calls."""

    class Wrapper(LessonFSDP):
        def whole(self, piece: Piece) -> Tensor:
            if self.rank:
                return super().whole(piece)
            flat = piece.shard.new_empty(piece.shard.numel() * self.world_size)
            dist.all_gather_into_tensor(flat, piece.shard)
            return flat[: piece.shape.numel()].view(piece.shape)

    return {"FullyShardedDataParallel": Wrapper}


@fault(source="a sign lost in a rewrite", needs="a run", check="fsdp.loss", stage="optimizer")
def fsdp_climbs() -> Names:
    """The reduced gradient has the wrong sign."""

    class Wrapper(LessonFSDP):
        def reduce(self, piece: Piece) -> Tensor:
            return -super().reduce(piece)

    return {"FullyShardedDataParallel": Wrapper}


@fault(
    source="moments of whole parameters beside the shard's",
    needs="bytes",
    check="fsdp.bytes",
    stage="memory",
    green=("fsdp.update",),
)
def fsdp_keeps_whole_moments() -> Names:
    """Running means of whole gradients stay on every rank, beside the optimizer's shards."""

    class Wrapper(LessonFSDP):
        def reduce(self, piece: Piece) -> Tensor:
            piece.means = [torch.zeros(piece.shape) for _ in range(3)]  # type: ignore[attr-defined]  # a note of the fault's own
            return super().reduce(piece)

    return {"FullyShardedDataParallel": Wrapper}
