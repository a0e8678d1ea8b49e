"""Faults of activation recomputation: a second forward that is not the first, or that leaves traces."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from minigpt_dist.verify.faults.again import Again, recompute_with
from minigpt_dist.verify.faults.catalogue import Names, fault


def _again(kind: type[Again]) -> Names:
    return {"recompute": recompute_with(kind)}


@fault(
    source="TTrace (arXiv 2506.09280), bug 2: NVIDIA/Megatron-LM, pull request 290",
    needs="two blocks in a row",
    check="recompute.blocks",
    stage="backward",
    world_size=1,
    tensor="gradient of the input",
    green=("recompute.evaluation",),
)
def every_block_is_run_again_from_the_firsts_input() -> Names:
    """Blocks of one group recompute from the input of the group's first: forward is right, and gradients are of another place."""
    first: list[Tensor] = []

    class Wrong(Again):
        def remember(self) -> list[Tensor]:
            kept = super().remember()
            if self.tensors()[0].is_leaf or not first:
                first[:] = [self.tensors()[0].detach().clone()]
            return [*first, *kept[1:]]

    return _again(Wrong)


@fault(
    source="torch.utils.checkpoint with preserve_rng_state=False",
    needs="dropout",
    check="recompute.dropout",
    stage="backward",
    world_size=1,
    green=("recompute.blocks", "recompute.arguments"),
)
def mask_is_drawn_anew() -> Names:
    """The second run draws another dropout mask than the first."""

    class Wrong(Again):
        def set_stream(self) -> None:
            torch.manual_seed(11)

    return _again(Wrong)


@fault(
    source="a stream that is rewound and not put back",
    needs="a number drawn after backward",
    check="recompute.dropout",
    stage="backward",
    world_size=1,
    tensor="the random stream",
    green=("recompute.arguments",),
)
def stream_stays_rewound() -> Names:
    """The random stream goes on from where the first block began: later masks repeat earlier ones."""

    class Wrong(Again):
        def rewound(self) -> AbstractContextManager[Any]:
            return nullcontext()

    return _again(Wrong)


@fault(
    source="pytorch/pytorch#96136",
    needs="a buffer that forward changes",
    check="recompute.blocks",
    stage="backward",
    world_size=1,
    tensor="buffer 0.calls",
    green=("recompute.arguments",),
)
def recompute_updates_buffers_twice() -> Names:
    """Counters and running means change in the second run too, though loss and gradients are right."""

    class Wrong(Again):
        def run(self, arguments: list[Any], then: list[Tensor]) -> Tensor:
            with torch.enable_grad(), self.casting(), self.rewound():
                self.set_stream()
                out: Tensor = self.block(*arguments)
            return out

    return _again(Wrong)


@fault(
    source="torch.utils.checkpoint with use_reentrant=True: none of the inputs have requires_grad=True",
    needs="a first block whose input is data",
    check="recompute.untrained_input",
    stage="backward",
    world_size=1,
    green=("recompute.blocks", "recompute.dropout"),
)
def weights_behind_data_get_no_gradient() -> Names:
    """Only arguments are inputs of the graph's node: where none wants a gradient, the block's weights get none."""

    def recompute(block: nn.Module, *args: Any) -> Tensor:
        if any(isinstance(a, Tensor) and a.requires_grad for a in args):
            return recompute_with(Again)(block, *args)
        with torch.no_grad():
            out: Tensor = block(*args)
        return out.requires_grad_(torch.is_grad_enabled())

    return {"recompute": recompute}


@fault(
    source="a wrapper that is never switched on",
    needs="bytes that autograd keeps",
    check="recompute.memory",
    stage="memory",
    world_size=1,
    green=("recompute.blocks", "recompute.dropout"),
)
def nothing_is_recomputed() -> Names:
    """Blocks run plainly and keep all they keep."""
    return {"recompute": lambda block, *args: block(*args)}


@fault(
    source="an output that is saved beside the input",
    needs="bytes that autograd keeps",
    check="recompute.memory",
    stage="memory",
    world_size=1,
    green=("recompute.blocks",),
)
def copies_are_kept_beside_the_input() -> Names:
    """Every block keeps three copies of its input until backward."""

    class Wrong(Again):
        def remember(self) -> list[Tensor]:
            kept = super().remember()
            return [*kept, *(self.tensors()[0].clone() for _ in range(3))]

        def run(self, arguments: list[Any], then: list[Tensor]) -> Tensor:
            return super().run(arguments, then[:-3])

    return _again(Wrong)


@fault(
    source="TrainCheck (arXiv 2506.14813), C6, Lightning-AI/lightning-thunder#725: autocast is not applied to a part of the operations",
    needs="autocast in forward",
    check="recompute.autocast",
    stage="backward",
    world_size=1,
    green=("recompute.blocks", "recompute.dropout"),
)
def second_run_is_not_cast() -> Names:
    """Backward stands outside of autocast, and what it computes again is in float32."""

    class Wrong(Again):
        def casting(self) -> AbstractContextManager[Any]:
            return torch.autocast("cpu", enabled=False)

    return _again(Wrong)


@fault(
    source="checkpoint(function, x): the one argument that everybody thinks of",
    needs="a second tensor that wants a gradient",
    check="recompute.arguments",
    stage="backward",
    world_size=1,
    green=("recompute.blocks", "recompute.dropout"),
)
def first_argument_alone_gets_a_gradient() -> Names:
    """The other tensors are constants of the second run."""

    class Wrong(Again):
        def tensors(self) -> list[Tensor]:
            found = super().tensors()
            return [*found[:1], *(t.detach() for t in found[1:])]

    return _again(Wrong)


@fault(
    source="gradients written from inside of backward",
    needs="two backwards before a step",
    check="recompute.several_backwards",
    stage="backward",
    world_size=1,
    green=("recompute.blocks", "recompute.dropout"),
)
def weights_gradients_are_assigned() -> Names:
    """The second run's gradients are put into p.grad, in place of being added to what is there."""

    class Wrong(Again):
        def trained(self) -> list[nn.Parameter]:
            for p in (found := super().trained()):
                p.grad = None if not self.args else p.grad
            return found

    return _again(Wrong)


@fault(
    source="torch.enable_grad in a second run that is the only one",
    needs="evaluation",
    check="recompute.evaluation",
    stage="forward",
    world_size=1,
    tensor="whether it wants a gradient",
    green=("recompute.blocks", "recompute.dropout"),
)
def evaluation_builds_a_graph() -> Names:
    """Gradients are switched on without being asked for: evaluation keeps every block."""

    def recompute(block: nn.Module, *args: Any) -> Tensor:
        with torch.enable_grad():
            return recompute_with(Again)(block, *args)

    return {"recompute": recompute}
