"""Faults of the fully sharded wrapper: what is lost in the cut, gathered late or kept, or reduced to the wrong thing."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from minigpt_dist.verify.faults.catalogue import Names, fault
from minigpt_dist.verify.faults.sharded_wrapper import LessonFSDP, Piece

NAME = "FullyShardedDataParallel"


@fault(source="reduce_scatter with SUM", needs="two ranks", check="fsdp.update", stage="reduce", step=1, rank=0)
def fsdp_sums_gradients() -> Names:
    """The reduced gradient is never divided by the world size."""

    class Wrapper(LessonFSDP):
        def reduce(self, piece: Piece) -> Tensor:
            return super().reduce(piece) * self.world_size

    return {NAME: Wrapper}


@fault(
    source="DDP's division kept beside reduce_scatter's", needs="two ranks", check="fsdp.update", stage="reduce", step=1
)
def fsdp_divides_twice() -> Names:
    """The gradient is divided before the sum and after it."""

    class Wrapper(LessonFSDP):
        def reduce(self, piece: Piece) -> Tensor:
            return super().reduce(piece) / self.world_size

    return {NAME: Wrapper}


@fault(source="an index off by one rank", needs="two ranks", check="fsdp.update", stage="reduce", step=1, rank=0)
def fsdp_takes_the_next_shard() -> Names:
    """Each rank takes the next rank's part of the mean gradient."""

    class Wrapper(LessonFSDP):
        def reduce(self, piece: Piece) -> Tensor:
            self.rank = (self.rank + 1) % self.world_size
            mean = super().reduce(piece)
            self.rank = (self.rank - 1) % self.world_size
            return mean

    return {NAME: Wrapper}


@fault(
    source="sync_module_states=False", needs="ranks seeded differently", check="fsdp.start", stage="broadcast", step=0
)
def fsdp_cuts_its_own_model() -> Names:
    """Every rank cuts the model that it has, and nothing makes them equal."""

    class Wrapper(LessonFSDP):
        def start(self) -> None:
            pass

    return {NAME: Wrapper}


@fault(
    source="numel // world_size",
    needs="sizes that two ranks do not divide",
    check="fsdp.uneven",
    stage="reduce",
    green=("fsdp.update", "fsdp.parameters"),
)
def fsdp_tail_gets_no_gradient() -> Names:
    """The elements beyond the last full share of a gradient are not reduced."""

    class Wrapper(LessonFSDP):
        def reduce(self, piece: Piece) -> Tensor:
            assert piece.p.grad is not None
            flat = piece.p.grad.view(-1)
            flat[flat.numel() // self.world_size * self.world_size :] = 0
            return super().reduce(piece)

    return {NAME: Wrapper}


@fault(
    source="rows // world_size where there are fewer rows than ranks",
    needs="a layer with one row",
    check="fsdp.few_rows",
    stage="reduce",
    green=("fsdp.update",),
)
def fsdp_skips_small_layers() -> Names:
    """A gradient with fewer rows than ranks is dropped."""

    class Wrapper(LessonFSDP):
        def reduce(self, piece: Piece) -> Tensor:
            mean = super().reduce(piece)
            return mean * (piece.shape[0] >= self.world_size)

    return {NAME: Wrapper}


@fault(
    source="parameters cut a layer at a time, without a look at which are shared",
    needs="a tied weight",
    check="fsdp.tied",
    stage="reduce",
    green=("fsdp.update", "fsdp.uneven"),
)
def fsdp_unties() -> Names:
    """A shared weight becomes two, each with its own gradient."""

    class Wrapper(LessonFSDP):
        def start(self) -> None:
            super().start()
            seen: set[Tensor] = set()
            for layer in self.module.modules():
                for name, p in layer._parameters.items():
                    if p is not None and p in seen:
                        setattr(layer, name, nn.Parameter(p.detach().clone()))
                    seen.update(() if p is None else (p,))

    return {NAME: Wrapper}


@fault(
    source="a finish call that touches every parameter",
    needs="a layer that nothing uses",
    check="fsdp.unused",
    stage="reduce",
    green=("fsdp.update",),
)
def fsdp_reuses_the_last_gradient() -> Names:
    """A parameter without a gradient in this step moves by that of the last."""

    class Wrapper(LessonFSDP):
        def finish_gradient_synchronization(self) -> None:
            super().finish_gradient_synchronization()
            for p in self.pieces:
                last = getattr(p, "last", None)
                p.grad = last if p.grad is None and last is not None else p.grad
                p.last = p.grad  # type: ignore[attr-defined]  # a note of the fault's own

    return {NAME: Wrapper}


@fault(
    source="requires_grad lost when a parameter is made anew",
    needs="a frozen layer",
    check="fsdp.frozen",
    stage="reduce",
    green=("fsdp.update",),
)
def fsdp_thaws() -> Names:
    """What is cut requires a gradient, also where the module's own did not."""

    class Wrapper(LessonFSDP):
        def add(self, p: nn.Parameter) -> None:
            p.requires_grad_(True)
            super().add(p)

    return {NAME: Wrapper}


@fault(
    source="grad = reduced, in place of +=",
    needs="two backwards",
    check="fsdp.accumulated",
    stage="reduce",
    green=("fsdp.update", "fsdp.twice"),
)
def fsdp_overwrites_the_shards_gradient() -> Names:
    """A second backward's gradient takes the place of the first's."""

    class Wrapper(LessonFSDP):
        def added(self, before: Tensor | None, mean: Tensor) -> Tensor:
            return mean

    return {NAME: Wrapper}


@fault(source="a view saved before the second gather", needs="a layer used twice", check="fsdp.twice", stage="reduce")
def fsdp_halves_what_is_used_twice() -> Names:
    """The gradient of a layer that ran twice is divided by its uses."""

    class Wrapper(LessonFSDP):
        def gather_all(self, layer: nn.Module) -> None:
            super().gather_all(layer)
            if layer._parameters and not torch._C._current_autograd_node():
                layer.uses = getattr(layer, "uses", 0) + 1  # type: ignore[assignment]  # a note of the fault's own

        def finish_gradient_synchronization(self) -> None:
            super().finish_gradient_synchronization()
            for layer in self.module.modules():
                for p in layer._parameters.values():
                    if p is not None and p.grad is not None:
                        p.grad /= max(1, getattr(layer, "uses", 1))
                layer.uses = 0  # type: ignore[assignment]  # a note of the fault's own

    return {NAME: Wrapper}


@fault(
    source="only .weight is handled",
    needs="a layer with a bias",
    check="fsdp.biases",
    stage="reduce",
    green=("fsdp.update",),
)
def fsdp_forgets_biases() -> Names:
    """Gradients of biases are not averaged over ranks."""

    class Wrapper(LessonFSDP):
        def reduce(self, piece: Piece) -> Tensor:
            assert piece.p.grad is not None
            owners = [m for m in self.module.modules() if isinstance(m, nn.Linear) and m.bias is piece.p]
            return self.part(piece.p.grad) if owners else super().reduce(piece)

    return {NAME: Wrapper}


@fault(source="forward(self, x)", needs="an argument by name", check="fsdp.forward", stage="forward", step=0, rank=0)
def fsdp_drops_keyword_arguments() -> Names:
    """The wrapper's forward hands on positional arguments only."""

    class Wrapper(LessonFSDP):
        def forward(self, *args: Any, **options: Any) -> Any:
            return self.module(*args)

    return {NAME: Wrapper}


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

    return {NAME: Wrapper}


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

    return {NAME: Wrapper}


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

    return {NAME: Wrapper}


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

    return {NAME: Wrapper}


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

    return {NAME: Wrapper}


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

    return {NAME: Wrapper}


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

    return {NAME: Wrapper}


@fault(source="error feedback that is not saved", needs="a resume", check="fsdp.resume", stage="optimizer")
def fsdp_hides_a_residual() -> Names:
    """What a rounded gradient leaves over is added to the next one, and no state has it."""

    class Wrapper(LessonFSDP):
        def reduce(self, piece: Piece) -> Tensor:
            exact = super().reduce(piece) + getattr(piece, "residual", 0.0)
            rounded = exact.bfloat16().float()
            piece.residual = exact - rounded  # type: ignore[attr-defined]  # a note of the fault's own
            return rounded

    return {NAME: Wrapper}


@fault(source="a list of handles that nobody empties", needs="several steps", check="fsdp.live", stage="memory")
def fsdp_keeps_every_handle() -> Names:
    """A list of reduced gradients grows by a step's each step."""

    class Wrapper(LessonFSDP):
        def reduce(self, piece: Piece) -> Tensor:
            mean = super().reduce(piece)
            self.handles = [*getattr(self, "handles", []), mean]
            return mean.clone()

    return {NAME: Wrapper}


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

    return {NAME: Wrapper}


@fault(source="a sign lost in a rewrite", needs="a run", check="fsdp.loss", stage="optimizer")
def fsdp_climbs() -> Names:
    """The reduced gradient has the wrong sign."""

    class Wrapper(LessonFSDP):
        def reduce(self, piece: Piece) -> Tensor:
            return -super().reduce(piece)

    return {NAME: Wrapper}


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

    return {NAME: Wrapper}
