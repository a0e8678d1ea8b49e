"""Faults of what the start does to a module besides: ties, frozen parameters, drawn weights, training mode."""

from __future__ import annotations

import torch
from torch import nn

from minigpt_dist.verify.faults import base
from minigpt_dist.verify.faults.catalogue import Names, fault


@fault(
    source="TTrace T5 (arXiv 2506.09280), NVIDIA/Megatron-LM#656",
    needs="a tied parameter",
    check="broadcast.first",
    stage="broadcast",
    tensor="weight",
    green=("oracle",),
)
def broadcast_unties_parameters() -> Names:
    """Each received value becomes a new Parameter under each of its names: tied weights drift apart from then on."""

    def broadcast_parameters(module: nn.Module, src: int = 0) -> None:
        base.broadcast_parameters(module, src)
        for child in module.modules():
            for name, p in list(child._parameters.items()):
                if p is not None:
                    child._parameters[name] = nn.Parameter(
                        p.detach().clone(memory_format=torch.preserve_format), p.requires_grad
                    )

    return {"broadcast_parameters": broadcast_parameters}


@fault(
    source="TrainCheck C11 (arXiv 2506.14813), the other way round",
    needs="a frozen parameter",
    check="broadcast.first",
    stage="broadcast",
    step=0,
    tensor="frozen",
)
def broadcast_thaws_frozen_parameters() -> Names:
    """After the broadcast every parameter requires a gradient."""

    def broadcast_parameters(module: nn.Module, src: int = 0) -> None:
        base.broadcast_parameters(module, src)
        module.requires_grad_(True)

    return {"broadcast_parameters": broadcast_parameters}


@fault(
    source="same seed in place of a broadcast",
    needs="a value that no seed gives",
    check="broadcast.first",
    stage="broadcast",
    step=0,
    rank=0,
    tensor="norm.running_mean",
)
def broadcast_reseeds_instead() -> Names:
    """Every rank draws its weights anew from one seed; what was there on rank 0 is lost, and plain parameters stay different."""

    def broadcast_parameters(module: nn.Module, src: int = 0) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            for child in module.modules():
                reset = getattr(child, "reset_parameters", None)
                if callable(reset):
                    reset()

    return {"broadcast_parameters": broadcast_parameters}


@fault(
    source="model.eval() before sending, and no way back",
    needs="a module in training mode, and one that is not",
    check="broadcast.first",
    stage="broadcast",
    step=0,
    green=("oracle",),
)
def broadcast_switches_the_mode() -> Names:
    """The module comes back in training mode, whatever it was in."""

    def broadcast_parameters(module: nn.Module, src: int = 0) -> None:
        base.broadcast_parameters(module, src)
        module.train()

    return {"broadcast_parameters": broadcast_parameters}
