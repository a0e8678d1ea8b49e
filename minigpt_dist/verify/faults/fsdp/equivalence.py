"""Faults of the update under a fully sharded wrapper: a start, a sum, a row, a layer or an argument that is lost."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from minigpt_dist.verify.faults.catalogue import Names, fault
from minigpt_dist.verify.faults.sharded_wrapper import LessonFSDP, Piece


@fault(source="reduce_scatter with SUM", needs="two ranks", check="fsdp.update", stage="reduce", step=1, rank=0)
def fsdp_sums_gradients() -> Names:
    """The reduced gradient is never divided by the world size."""

    class Wrapper(LessonFSDP):
        def reduce(self, piece: Piece) -> Tensor:
            return super().reduce(piece) * self.world_size

    return {"FullyShardedDataParallel": Wrapper}


@fault(
    source="DDP's division kept beside reduce_scatter's", needs="two ranks", check="fsdp.update", stage="reduce", step=1
)
def fsdp_divides_twice() -> Names:
    """The gradient is divided before the sum and after it."""

    class Wrapper(LessonFSDP):
        def reduce(self, piece: Piece) -> Tensor:
            return super().reduce(piece) / self.world_size

    return {"FullyShardedDataParallel": Wrapper}


@fault(source="an index off by one rank", needs="two ranks", check="fsdp.update", stage="reduce", step=1, rank=0)
def fsdp_takes_the_next_shard() -> Names:
    """Each rank takes the next rank's part of the mean gradient."""

    class Wrapper(LessonFSDP):
        def reduce(self, piece: Piece) -> Tensor:
            self.rank = (self.rank + 1) % self.world_size
            mean = super().reduce(piece)
            self.rank = (self.rank - 1) % self.world_size
            return mean

    return {"FullyShardedDataParallel": Wrapper}


@fault(
    source="sync_module_states=False", needs="ranks seeded differently", check="fsdp.start", stage="broadcast", step=0
)
def fsdp_cuts_its_own_model() -> Names:
    """Every rank cuts the model that it has, and nothing makes them equal."""

    class Wrapper(LessonFSDP):
        def start(self) -> None:
            pass

    return {"FullyShardedDataParallel": Wrapper}


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

    return {"FullyShardedDataParallel": Wrapper}


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

    return {"FullyShardedDataParallel": Wrapper}


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

    return {"FullyShardedDataParallel": Wrapper}


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

    return {"FullyShardedDataParallel": Wrapper}


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

    return {"FullyShardedDataParallel": Wrapper}


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

    return {"FullyShardedDataParallel": Wrapper}


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

    return {"FullyShardedDataParallel": Wrapper}


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

    return {"FullyShardedDataParallel": Wrapper}


@fault(source="forward(self, x)", needs="an argument by name", check="fsdp.forward", stage="forward", step=0, rank=0)
def fsdp_drops_keyword_arguments() -> Names:
    """The wrapper's forward hands on positional arguments only."""

    class Wrapper(LessonFSDP):
        def forward(self, *args: Any, **options: Any) -> Any:
            return self.module(*args)

    return {"FullyShardedDataParallel": Wrapper}
