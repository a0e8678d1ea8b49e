"""Finding the pieces of a submission in torch's shape, by inspection.

Owns what counts as a sharded optimizer `(params, optimizer_cls, **kwargs)`, as torch's ZeroRedundancyOptimizer is, and as a
data-parallel wrapper `(module)` or `(module, bucket_size_mb)` with a finish call after backward; or the functions of an
`adapters.py` that make them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch import nn

FINISH_NAMES = (
    "finish_gradient_synchronization",
    "finish_gradient_sync",
    "finish_grad_sync",
    "sync_gradients",
    "sync_grads",
    "synchronize_gradients",
    "synchronize",
    "finish_backward",
    "finalize_backward",
    "finish",
    "all_reduce_grads",
    "allreduce_gradients",
    "average_gradients",
    "reduce_gradients",
    "wait",
)
OPTIMIZER_CLASS_WORDS = (
    "optimizer_cls",
    "optimizer_class",
    "optimizer_type",
    "optim_cls",
    "optim_class",
    "opt_cls",
    "opt_class",
    "optim",
    "cls",
    "base_optimizer",
    "base_optimizer_cls",
    "base_optimizer_class",
    "inner_optimizer_cls",
    "inner_cls",
)


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
        if (
            len(names) >= 2
            and any(word in names[1:3] for word in OPTIMIZER_CLASS_WORDS)
            and callable(getattr(c, "step", None))
        ):
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
        wraps = bool(names) and names[0] in ("module", "model") and not any(w in names for w in OPTIMIZER_CLASS_WORDS)
        named = any(word in c.__name__.lower() for word in ("ddp", "dataparallel", "data_parallel"))
        if wraps and callable_module and (named or finish_of(c) is not None):
            return c
    return None


def finish_of(wrapper: Any) -> Callable[..., Any] | None:
    """The call that ends gradient averaging after backward, under any of its usual names; None if hooks do all of it."""
    for name in FINISH_NAMES:
        call = getattr(wrapper, name, None)
        if callable(call):
            return call  # type: ignore[no-any-return]  # getattr is Any
    return None


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
