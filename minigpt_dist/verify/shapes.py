"""Finding the pieces of a submission in torch's shape, by inspection.

Owns what counts as a sharded optimizer `(params, optimizer_cls, **kwargs)`, as torch's ZeroRedundancyOptimizer is, and as a
data-parallel wrapper `(module)` or `(module, bucket_size_mb)` with a finish call after backward; or the functions of an
`adapters.py` that make them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from types import ModuleType
from typing import Any

from torch import nn

# The call after backward has no settled name: these, and any public method of no argument named from these words.
FINISH_NAMES = ("finish_gradient_synchronization", "sync_gradients", "sync_grads", "synchronize", "all_reduce_grads")
FINISH_VERBS = (
    "sync",
    "synchron",
    "reduce",
    "average",
    "finish",
    "final",
    "flush",
    "wait",
    "post_backward",
    "after_backward",
)
NO_FINISH = ("no_sync", "start", "zero", "reset", "require", "async", "init", "broadcast", "param", "buffer", "set_")
# A wrapper that shards gradients or parameters leaves no mean gradient in every p.grad, and is no data-parallel wrapper in that sense.
SHARDED_WORDS = ("fsdp", "shard", "zero")
OPTIMIZER_CLASS_WORDS = (
    "optimizer_cls",
    "optimizer_class",
    "optimizer_type",
    "optim_cls",
    "optim_class",
    "optim",
    "cls",
    "inner_cls",
)


def takes_optimizer_class(names: Collection[str]) -> bool:
    """Is one of these the name of an argument that takes an optimizer's class? `opt`, `base_optimizer_cls`, ... as well."""
    return any(n in OPTIMIZER_CLASS_WORDS or ("opt" in n and n not in ("options", "opts")) for n in names)


def _own_classes(module: ModuleType) -> list[type]:
    """Public classes that the submission wrote itself, in the order of its file."""
    found = [c for n, c in vars(module).items() if inspect.isclass(c) and not n.startswith("_")]
    return [c for c in found if not c.__module__.startswith(("torch.", "collections", "typing", "abc"))]


def _parameters(function: Callable[..., Any]) -> list[str]:
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return []


def find_sharded_optimizer(module: ModuleType) -> Callable[..., Any] | None:
    """A function `get_sharded_optimizer`, or the class whose constructor takes parameters and an optimizer class."""
    maker = getattr(module, "get_sharded_optimizer", None)
    if callable(maker):
        return maker  # type: ignore[no-any-return]  # getattr is Any
    for c in _own_classes(module):
        names = _parameters(c)
        if len(names) >= 2 and takes_optimizer_class(names[1:3]) and callable(getattr(c, "step", None)):
            return c
    return None


def find_data_parallel(module: ModuleType) -> Callable[..., Any] | None:
    """A function `get_ddp...`, or the class that wraps a module and is called in its place."""
    for name in (
        "get_ddp",
        "get_ddp_bucketed",
        "get_ddp_individual_parameters",
        "get_ddp_overlap_individual_parameters",
    ):
        maker = getattr(module, name, None)
        if callable(maker):
            return maker  # type: ignore[no-any-return]  # getattr is Any
    for c in _own_classes(module):
        names = _parameters(c)
        callable_module = issubclass(c, nn.Module) or "forward" in vars(c) or "__call__" in vars(c)
        wraps = bool(names) and names[0] in ("module", "model") and not takes_optimizer_class(names)
        name = c.__name__.lower().replace("_", "")
        named = any(word in name for word in ("ddp", "dataparallel"))
        sharded = any(word in name for word in SHARDED_WORDS)
        if wraps and callable_module and not sharded and (named or finish_of(c) is not None):
            return c
    return None


def finish_of(wrapper: Any) -> Callable[..., Any] | None:
    """The call that ends gradient averaging after backward; None if hooks do all of it."""
    for name in (*FINISH_NAMES, *_finish_like(wrapper)):
        call = getattr(wrapper, name, None)
        if callable(call):
            return call  # type: ignore[no-any-return]  # getattr is Any
    return None


def _finish_like(wrapper: Any) -> list[str]:
    """Public methods, of the wrapper's own class, that take no argument and sound like the end of a backward pass."""
    kind = wrapper if inspect.isclass(wrapper) else type(wrapper)
    found = []
    for c in inspect.getmro(kind):
        if c.__module__.startswith("torch.") or c is object:
            continue
        for name, method in vars(c).items():
            sounds = any(verb in name.lower() for verb in FINISH_VERBS) and not any(
                w in name.lower() for w in NO_FINISH
            )
            if sounds and not name.startswith("_") and inspect.isfunction(method) and _needs_no_argument(method):
                found.append(name)
    return sorted(found, key=lambda n: "grad" not in n)


def _needs_no_argument(method: Callable[..., Any]) -> bool:
    parameters = list(inspect.signature(method).parameters.values())[1:]
    return all(p.default is not p.empty or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)


def finish_function(module: ModuleType) -> Callable[..., Any] | None:
    """`adapters.py` form: a function called with (ddp_model, optimizer) after backward."""
    for name in (
        "ddp_on_after_backward",
        "ddp_bucketed_on_after_backward",
        "ddp_individual_parameters_on_after_backward",
    ):
        call = getattr(module, name, None)
        if callable(call):
            return call  # type: ignore[no-any-return]  # getattr is Any
    return None
