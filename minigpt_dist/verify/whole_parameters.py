"""Reading whole parameters out of a fully sharded wrapper, under whatever name a submission gives to that.

Owns the names, and the order in which ways are tried: a function of the file, a method, `state_dict()`, and where there is none of
these, the modules themselves in the middle of a forward pass; what that does not use is put together from the ranks' shards. Each way
counts only if it yields every parameter in its whole shape. All of it is collective: every rank calls it at the same time.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from minigpt_dist.parallel.collectives import exchange
from minigpt_dist.trace import own_part, tensor_bytes
from minigpt_dist.verify.shapes import finish_of

GATHER_FUNCTIONS = (
    "fsdp_gather_full_params",
    "gather_full_params",
    "gather_full_parameters",
    "get_full_params",
    "full_params",
    "full_state_dict",
    "summon_full_params",
)
GATHER_METHODS = (
    "gather_full_params",
    "gather_full_parameters",
    "gather_full_state_dict",
    "get_full_params",
    "get_full_parameters",
    "get_full_state_dict",
    "full_params",
    "full_parameters",
    "full_state_dict",
    "summon_full_params",
)
WHOLE_WORDS = ("full", "whole", "gather", "unshard", "summon", "consolidate", "export")
STATE_WORDS = ("param", "state", "weight")
NOT_READING = ("free", "set", "load", "reshard", "backward", "hook", "pre_", "post_", "grad")
# Path components that wrappers put into names.
WRAPPING = ("module", "_module", "_fsdp_wrapped_module", "_orig_mod", "model", "_fsdp_module")

Shapes = Mapping[str, torch.Size]
Way = Callable[[], Any]


class NotReadableError(Exception):
    """No way was found to read every parameter of a wrapper in its whole shape."""


def plain(name: str) -> str:
    """A parameter's name without the components that wrappers add."""
    return ".".join(part for part in name.split(".") if part not in WRAPPING)


def complete(found: Mapping[str, Tensor], shapes: Shapes, aliases: Mapping[str, str]) -> dict[str, Tensor] | None:
    """The whole parameters in `found` by the module's own names; None where one is missing or has another shape.

    aliases: each name of a tied parameter -> the name that it is listed under; either may stand for it.
    """
    by_name = {plain(name): t for name, t in found.items()}
    whole = {}
    for name, shape in shapes.items():
        value = by_name.get(plain(name))
        if value is None:
            value = next(
                (by_name[plain(a)] for a, first in aliases.items() if first == name and plain(a) in by_name), None
            )
        if value is None or value.shape != shape or not is_there(value):
            return None
        spread = getattr(value, "full_tensor", None)  # of a DTensor, which looks whole
        whole[name] = value.detach() if spread is None else spread().detach()
    return whole


def is_there(t: Tensor) -> bool:
    """Is there memory behind a tensor? One that was freed by `storage.resize_(0)` keeps its shape, and must not be read."""
    return own_part(t).untyped_storage().nbytes() >= own_part(t).numel() * t.element_size()


def ways(file: ModuleType | None, wrapper: Any, module: nn.Module) -> Iterator[tuple[str, Way]]:
    """(what it is, a call that yields something) for every way that a submission offers, the most explicit first."""
    for name in GATHER_FUNCTIONS:
        call = getattr(file, name, None)
        if inspect.isfunction(call) and not call.__module__.startswith("torch."):
            yield f"{name}(wrapper)", lambda call=call: call(wrapper)  # type: ignore[misc]  # bound at once
    for name in dict.fromkeys((*GATHER_METHODS, *_like_gather(wrapper))):
        value = getattr(wrapper, name, None)
        if value is not None:
            yield f"wrapper.{name}", lambda value=value: value() if callable(value) else value  # type: ignore[misc]
    for owner in (wrapper, module):
        if callable(getattr(owner, "state_dict", None)):
            yield "state_dict()", owner.state_dict


def _like_gather(wrapper: Any) -> list[str]:
    """Public methods of the wrapper's own class, without a needed argument, that sound as if they gave whole parameters."""
    found = []
    for c in inspect.getmro(type(wrapper)):
        if c.__module__.startswith("torch.") or c is object:
            continue
        for name, method in vars(c).items():
            sounds = any(w in name for w in WHOLE_WORDS) and any(w in name for w in STATE_WORDS)
            bad = name.startswith("_") or any(w in name for w in NOT_READING)
            if sounds and not bad and inspect.isfunction(method) and not _needs_argument(method):
                found.append(name)
    return found


def _needs_argument(method: Callable[..., Any]) -> bool:
    own = list(inspect.signature(method).parameters.values())[1:]
    return any(p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in own)


def named_tensors(result: Any, module: nn.Module, shapes: Shapes) -> dict[str, Tensor]:
    """The tensors by name in what a way gave: a mapping, pairs, a list in the module's order, one flat tensor, or a context to read in."""
    if isinstance(result, Mapping):
        return {str(name): t for name, t in result.items() if isinstance(t, Tensor)}
    if hasattr(result, "__enter__"):
        with result:
            return {name: p.detach().clone() for name, p in module.named_parameters()}
    if isinstance(result, Tensor):
        sizes = [shape.numel() for shape in shapes.values()]
        flat = result.reshape(-1)[: sum(sizes)].split(sizes)
        return {name: t.view(shape) for (name, shape), t in zip(shapes.items(), flat, strict=True)}
    if result is None:
        return {}
    parts = list(result)
    if all(isinstance(part, Tensor) for part in parts) and len(parts) == len(shapes):
        return dict(zip(shapes, parts, strict=True))
    return {str(name): t for name, t in parts if isinstance(t, Tensor)}


def seen_in_forward(wrapper: Any, module: nn.Module, shapes: Shapes, example: Tensor) -> dict[str, Tensor]:
    """The parameters that modules have at the moment they are used, in a forward pass of `example`."""
    found: dict[str, Tensor] = {}

    def look(prefix: str) -> Callable[[nn.Module, Any], None]:
        def hook(used: nn.Module, inputs: Any) -> None:
            for name in {plain(f"{prefix}.{n}"): n for n in _attributes(used)}.items():
                value = getattr(used, name[1])
                if name[0] in wanted and value.shape == wanted[name[0]] and is_there(value):
                    found[name[0]] = value.detach().clone()

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


def _end_of_step(wrapper: Any, module: nn.Module) -> None:
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
    """Parameters put together from what each rank has under their names: equal wholes, blocks of rows, or pieces of a flat vector."""
    own = {plain(name): p.detach() for name, p in module.named_parameters() if is_there(p)}
    found = {}
    for name, shape in shapes.items():
        mine = own.get(plain(name))
        parts = [bytes(part) for part in exchange(b"" if mine is None else tensor_bytes(mine.float()))]
        if mine is not None and mine.shape == shape:
            found[name] = mine
        elif mine is not None and sum(map(len, parts)) >= shape.numel() * 4:
            flat = torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.float32)
            found[name] = flat[: shape.numel()].view(shape)
    return found


def _attributes(module: nn.Module) -> list[str]:
    """Names of a module's own tensors: parameters, or what stands in their place during a pass."""
    plain_ones = [name for name, value in vars(module).items() if isinstance(value, Tensor)]
    return [*(n for n, p in module._parameters.items() if p is not None), *plain_ones]


class Reader:
    """Reads whole parameters the same way each time, the first that worked."""

    def __init__(self, file: ModuleType | None, shapes: Shapes, aliases: Mapping[str, str], example: Tensor) -> None:
        self.file, self.shapes, self.aliases, self.example = file, shapes, aliases, example
        self.chosen = ""

    def read(self, wrapper: Any, module: nn.Module) -> dict[str, Tensor]:
        """Every parameter by name, whole. NotReadableError where no way gives that; what a way itself raises, if it is the only one."""
        failure: Exception | None = None
        for name, way in self._ways(wrapper, module):
            if self.chosen not in ("", name):
                continue
            try:
                whole = complete(named_tensors(way(), module, self.shapes), self.shapes, self.aliases)
            except Exception as error:  # of the submission's own: the next way may do
                failure = failure or error
                whole = None
            if whole is not None:
                self.chosen = name
                return whole
        if failure is not None and not isinstance(failure, TypeError):
            raise failure
        offered = ", ".join(dict.fromkeys(name for name, _ in self._ways(wrapper, module)))
        raised = "" if failure is None else f"; {type(failure).__name__}: {failure}"
        raise NotReadableError(
            f"no way gives every parameter in its whole shape (tried {offered}{raised}): offer gather_full_params()"
        )

    def _ways(self, wrapper: Any, module: nn.Module) -> Iterator[tuple[str, Way]]:
        yield from ways(self.file, wrapper, module)
        yield "a forward pass", lambda: self._by_use(wrapper, module)

    def _by_use(self, wrapper: Any, module: nn.Module) -> dict[str, Tensor]:
        """What a forward pass shows; of what it does not use, the shards put together. A step is a pass and its finish call."""
        seen = seen_in_forward(wrapper, module, self.shapes, self.example)
        _end_of_step(wrapper, module)
        return {**from_shards(module, {n: shape for n, shape in self.shapes.items() if plain(n) not in seen}), **seen}
