"""Activation recomputation: a block keeps its input alone, and computes the rest again when backward needs it (Chen et al. 2016,
"Training deep nets with sublinear memory cost").

Owns that the second forward is the first one's equal, bit for bit: same random numbers, same buffers, same autocast. Leaves which
modules do so to the caller; by block, a step holds the input of every block and the activations of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from minigpt_dist.model import MiniGPT


def recompute_blocks(model: MiniGPT) -> MiniGPT:
    """Make every block of `model` recompute its activations in backward, in place; the model is returned.

    Names, parameters and hooks stay as they are. Without gradients (evaluation), nothing changes.
    """
    for block in model.blocks:
        block.forward = partial(recomputed, block.forward, block)
    return model


def recomputed(run: Callable[[Tensor], Tensor], module: nn.Module, x: Tensor) -> Tensor:
    """`run(x)`, whose gradients will be computed by running it again; `run` is `module`'s forward, of one tensor to one.

    Parameters are inputs of the graph's node: their gradients take autograd's usual way, past whatever hooks wait for them, and the
    output needs a gradient even where `x` does not.
    """
    if not torch.is_grad_enabled():
        return run(x)
    trained = [p for p in module.parameters() if p.requires_grad]
    out: Tensor = _Recomputed.apply(run, module, x, *trained)  # type: ignore[no-untyped-call]  # torch leaves it unannotated
    return out


class _Recomputed(torch.autograd.Function):
    """What forward needs again is saved as autograd saves: freed after backward, kept if the graph is."""

    @staticmethod
    def forward(
        ctx: Any, run: Callable[[Tensor], Tensor], module: nn.Module, x: Tensor, *trained: nn.Parameter
    ) -> Tensor:
        ctx.run, ctx.module, ctx.trained = run, module, trained
        kind = x.device.type
        ctx.autocast = (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
        ctx.save_for_backward(x, *_random_states(x.device), *(buffer.clone() for buffer in module.buffers()))
        return run(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved, *then = ctx.saved_tensors
        x = saved.detach().requires_grad_(ctx.needs_input_grad[2])
        wanted = [t for t in (x, *ctx.trained) if t.requires_grad]
        with torch.enable_grad(), torch.autocast(*ctx.autocast), _as_it_was(ctx.module, x.device, then):
            found = iter(torch.autograd.grad(ctx.run(x), wanted, grads[0], allow_unused=True))
        return None, None, next(found) if x.requires_grad else None, *found


def _random_states(device: torch.device) -> list[Tensor]:
    """Of the CPU's stream, and of the device's own if it is a GPU."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


@contextmanager
def _as_it_was(module: nn.Module, device: torch.device, then: list[Tensor]) -> Iterator[None]:
    """Inside, random streams and buffers are those of `then`; on leaving, they are as now: nothing is drawn or counted twice."""
    gpus = [device] if device.type == "cuda" else []
    streams, buffers = then[: 1 + len(gpus)], then[1 + len(gpus) :]
    now = [buffer.clone() for buffer in module.buffers()]
    with torch.random.fork_rng(gpus):
        torch.set_rng_state(streams[0])
        for gpu in gpus:
            torch.cuda.set_rng_state(streams[1], gpu)
        _put(module, buffers)
        try:
            yield
        finally:
            _put(module, now)


def _put(module: nn.Module, values: list[Tensor]) -> None:
    with torch.no_grad():
        for buffer, value in zip(module.buffers(), values, strict=True):
            buffer.copy_(value)
