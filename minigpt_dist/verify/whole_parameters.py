"""Reading whole parameters out of a fully sharded wrapper, under whatever name a submission gives to that.

Owns the names, and the order in which ways are tried: a function of the file, a method, `state_dict()`, and where there is none of
these, the modules themselves in the middle of a forward pass; what that does not use is put together from the ranks' shards. Each way
counts only if it yields every parameter in its whole shape. All of it is collective: every rank calls it at the same time.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from minigpt_dist.verify.parameters_in_use import Shapes, end_of_step, from_shards, is_there, plain, seen_in_forward

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
Way = Callable[[], Any]


class NotReadableError(Exception):
    """No way was found to read every parameter of a wrapper in its whole shape."""


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
        end_of_step(wrapper, module)
        return {**from_shards(module, {n: shape for n, shape in self.shapes.items() if plain(n) not in seen}), **seen}
