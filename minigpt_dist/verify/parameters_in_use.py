"""Whole parameters where nothing hands them out: seen at the moment a module uses them, or put together from the ranks' shards.

Owns which tensor of a module stands for which parameter: the one of its name, or the only one of its shape in the same module. Leaves
when this is needed to `whole_parameters.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from minigpt_dist.parallel.collectives import exchange
from minigpt_dist.trace import own_part, tensor_bytes
from minigpt_dist.verify.shapes import finish_of

# Path components that wrappers put into names.
WRAPPING = ("module", "_module", "_fsdp_wrapped_module", "_orig_mod", "model", "_fsdp_module")

Shapes = Mapping[str, torch.Size]


def plain(name: str) -> str:
    """A parameter's name without the components that wrappers add."""
    return ".".join(part for part in name.split(".") if part not in WRAPPING)


def is_there(t: Tensor) -> bool:
    """Is there memory behind a tensor? One that was freed by `storage.resize_(0)` keeps its shape, and must not be read."""
    return own_part(t).untyped_storage().nbytes() >= own_part(t).numel() * t.element_size()


def seen_in_forward(wrapper: Any, module: nn.Module, shapes: Shapes, example: Tensor) -> dict[str, Tensor]:
    """The parameters that modules have at the moment they are used, in a forward pass of `example`."""
    found: dict[str, Tensor] = {}

    def look(prefix: str) -> Callable[[nn.Module, Any], None]:
        def hook(used: nn.Module, inputs: Any) -> None:
            for name, value in _standing_for(used, plain(prefix), wanted).items():
                found[name] = value.detach().clone()

        return hook

    wanted = {plain(name): shape for name, shape in shapes.items()}
    handles = [m.register_forward_pre_hook(look(name)) for name, m in module.named_modules()]
    try:
        with torch.no_grad():
            wrapper(example)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _standing_for(used: nn.Module, place: str, wanted: Shapes) -> dict[str, Tensor]:
    """Of the parameters wanted of the module at `place`: its tensor of that name, else its only one of that shape."""
    own = {n: t for n, t in _tensors(used).items() if is_there(t)}
    found = {}
    for name, shape in wanted.items():
        parent, _, last = name.rpartition(".")
        if parent == place:
            named = [own[last]] if last in own and own[last].shape == shape else []
            alike = named or [t for t in own.values() if t.shape == shape]
            if len(alike) == 1:
                found[name] = alike[0]
    return found


def end_of_step(wrapper: Any, module: nn.Module) -> None:
    """Call what a wrapper wants called after backward: some clear then what a forward left. Gradients are as they were afterwards."""
    kept = [(p, p.grad) for p in module.parameters()]
    for p, _ in kept:
        p.grad = None
    call = finish_of(wrapper)
    with suppress(Exception):  # of the submission's own: there was no backward for it to finish
        if call is not None:
            call()
    for p, grad in kept:
        with suppress(RuntimeError):  # of another shape: this pass has changed what the parameter is
            p.grad = grad


def from_shards(module: nn.Module, shapes: Shapes) -> dict[str, Tensor]:
    """Parameters put together from what each rank has for them: equal wholes, blocks of rows, or pieces of a flat vector."""
    own = {plain(name): p.detach() for name, p in module.named_parameters() if is_there(p)}
    found = {}
    for name, shape in shapes.items():
        mine = own.get(plain(name), _only_child(own, plain(name).rpartition(".")[0]))
        parts = [bytes(part) for part in exchange(b"" if mine is None else tensor_bytes(mine.float()))]
        if mine is not None and mine.shape == shape:
            found[name] = mine
        elif mine is not None and sum(map(len, parts)) >= shape.numel() * 4:
            flat = torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.float32)
            found[name] = flat[: shape.numel()].view(shape)
    return found


def _only_child(own: Mapping[str, Tensor], place: str) -> Tensor | None:
    """The only parameter that a module has, if it has just one."""
    children = [t for name, t in own.items() if name.rpartition(".")[0] == place]
    return children[0] if len(children) == 1 else None


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """A module's own tensors by name: parameters, or what stands in their place during a pass."""
    plain_ones = {name: value for name, value in vars(module).items() if isinstance(value, Tensor)}
    return {**{n: p for n, p in module._parameters.items() if p is not None}, **plain_ones}
