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


def recompute(block: nn.Module, *args: Any) -> Tensor:
    """`block(*args)`, whose activations are computed again in backward; `block` returns one tensor, arguments may be anything."""
    return recomputed(block, block, *args)


def recomputed(run: Callable[..., Tensor], module: nn.Module, *args: Any) -> Tensor:
    """`run(*args)`, whose gradients will be computed by running it again; `run` is `module`'s forward, of anything to one tensor.

    Parameters are inputs of the graph's node: their gradients take autograd's usual way, past whatever hooks wait for them, and the
    output needs a gradient even where no argument does.
    """
    if not torch.is_grad_enabled():
        return run(*args)
    trained = [p for p in module.parameters() if p.requires_grad]
    out: Tensor = _Recomputed.apply(run, module, len(args), *args, *trained)  # type: ignore[no-untyped-call]  # torch leaves it unannotated
    return out


class _Recomputed(torch.autograd.Function):
    """What forward needs again is saved as autograd saves: freed after backward, kept if the graph is."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., Tensor], module: nn.Module, count: int, *inputs: Any) -> Tensor:
        args = inputs[:count]
        device = next((a.device for a in args if isinstance(a, Tensor)), torch.device("cpu"))
        ctx.run, ctx.module, ctx.trained, ctx.device = run, module, inputs[count:], device
        ctx.autocast = (device.type, torch.get_autocast_dtype(device.type), torch.is_autocast_enabled(device.type))
        ctx.others = [None if isinstance(a, Tensor) else a for a in args]
        ctx.places = [i for i, a in enumerate(args) if isinstance(a, Tensor)]
        tensors = [args[i] for i in ctx.places]
        ctx.save_for_backward(*tensors, *_random_states(device), *(buffer.clone() for buffer in module.buffers()))
        return run(*args)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved, args = ctx.saved_tensors, [*ctx.others]
        for i, tensor in zip(ctx.places, saved, strict=False):
            args[i] = tensor.detach().requires_grad_(ctx.needs_input_grad[3 + i])
        wanted = [t for t in (*args, *ctx.trained) if isinstance(t, Tensor) and t.requires_grad]
        then = list(saved[len(ctx.places) :])
        with torch.enable_grad(), torch.autocast(*ctx.autocast), _as_it_was(ctx.module, ctx.device, then):
            found = iter(torch.autograd.grad(ctx.run(*args), wanted, grads[0], allow_unused=True))
        mine = [next(found) if isinstance(a, Tensor) and a.requires_grad else None for a in args]
        return None, None, None, *mine, *found


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
