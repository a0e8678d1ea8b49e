"""Finding the pieces of a submission in torch's shape, by inspection.

Owns what counts as a sharded optimizer `(params, optimizer_cls, **kwargs)`, as torch's ZeroRedundancyOptimizer is, as a data-parallel
wrapper `(module)` or `(module, bucket_size_mb)` with a finish call after backward, and as a fully sharded wrapper; or the functions of
an `adapters.py` that make them. Leaves how whole parameters are read from such a wrapper to `whole_parameters.py`.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Collection
from types import ModuleType
from typing import Any, TypeGuard

from torch import nn
from torch.optim import Optimizer

# The call after backward has no settled name: these, and any public method of no argument named from these words.
FINISH_NAMES = ("finish_gradient_synchronization", "sync_gradients", "sync_grads", "synchronize", "all_reduce_grads")
# The functions of an `adapters.py` go together: one that makes a wrapper, one before a step and one after a backward of that wrapper.
DDP_KINDS = ("ddp", "ddp_bucketed", "ddp_individual_parameters", "ddp_overlap_individual_parameters")
FSDP_FINISH = ("fsdp_on_after_backward", "fully_sharded_on_after_backward")
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
# A wrapper may have to be told that a step begins, too.
START_WORDS = (
    "batch_start",
    "start_train_batch",
    "start_batch",
    "step_start",
    "start_step",
    "begin_step",
    "reset_bucket",
)
NO_FINISH = ("no_sync", "start", "zero", "reset", "require", "async", "init", "broadcast", "param", "buffer", "set_")
# A wrapper that shards gradients or parameters leaves no mean gradient in every p.grad, and is no data-parallel wrapper in that sense.
SHARDED_WORDS = ("fsdp", "shard", "zero")
# Of several wrappers in a file, these are first tries.
SIMPLE_WORDS = ("naive", "minimal", "simple", "flat", "toy")
FULLY_SHARDED_WORDS = ("fsdp", "fullyshard", "zero3", "zerostage3")
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


def required(function: Callable[..., Any]) -> list[str]:
    """Names of a callable's parameters that have no default, but for the first."""
    return [p.name for p in list(inspect.signature(function).parameters.values())[1:] if p.default is p.empty]


def find_sharded_optimizer(module: ModuleType) -> Callable[..., Any] | None:
    """A function `get_sharded_optimizer`, or the class whose constructor takes parameters and an optimizer class."""
    maker: Callable[..., Any] | None = getattr(module, "get_sharded_optimizer", None)
    if offered(maker):
        return maker
    found = _chosen([c for c in _own_classes(module) if _is_optimizer(c)])
    return found or (maker if callable(maker) else None)


def _is_optimizer(c: type) -> bool:
    names = _parameters(c)
    return len(names) >= 2 and takes_optimizer_class(names[1:3]) and callable(getattr(c, "step", None))


def _chosen(found: list[type]) -> type | None:
    """Of several classes that would do, the first that is complete, that others are not built on, and that is no first try by its name."""

    def rank(c: type) -> tuple[bool, bool, bool]:
        complete = issubclass(c, Optimizer) or finish_of(c) is not None
        base = any(other is not c and issubclass(other, c) for other in found)
        return complete, not base, not any(word in c.__name__.lower() for word in SIMPLE_WORDS)

    return max(found, key=rank, default=None)


def find_data_parallel(module: ModuleType) -> Callable[..., Any] | None:
    """A function `get_ddp...`, or the class that wraps a module and is called in its place."""
    makers = [m for kind in DDP_KINDS if callable(m := getattr(module, f"get_{kind}", None))]
    written = [m for m in makers if offered(m)]
    if written:
        return written[0]
    found = _chosen([c for c in _own_classes(module) if _wraps_data_parallel(c)])
    return found or (makers[0] if makers else None)


def _wraps_data_parallel(c: type) -> bool:
    names, name = _parameters(c), c.__name__.lower().replace("_", "")
    called = issubclass(c, nn.Module) or "forward" in vars(c) or "__call__" in vars(c)
    wraps = bool(names) and names[0] in ("module", "model") and not takes_optimizer_class(names)
    named = any(word in name for word in ("ddp", "dataparallel"))
    sharded = any(word in name for word in SHARDED_WORDS)
    return wraps and called and not sharded and (named or finish_of(c) is not None)


def find_fully_sharded(module: ModuleType) -> Callable[..., Any] | None:
    """A function `get_fsdp` that is written, or the class that wraps a module and cuts its parameters, or a function `fully_shard`."""
    maker = getattr(module, "get_fsdp", None)
    if inspect.isfunction(maker) and offered(maker):
        return maker
    found = _chosen([c for c in _own_classes(module) if _wraps_fully_sharded(c)])
    if found is not None:
        return found
    own = getattr(module, "fully_shard", None)
    return own if inspect.isfunction(own) and not own.__module__.startswith("torch.") else None


def _wraps_fully_sharded(c: type) -> bool:
    names, name = _parameters(c), c.__name__.lower().replace("_", "")
    called = issubclass(c, nn.Module) or "forward" in vars(c) or "__call__" in vars(c)
    wraps = bool(names) and names[0] in ("module", "model") and not takes_optimizer_class(names)
    return wraps and called and any(word in name for word in FULLY_SHARDED_WORDS)


def offered(piece: Any) -> TypeGuard[Callable[..., Any]]:
    """Is there such a piece, and more of it than a stub?"""
    return callable(piece) and not is_stub(piece)


def is_stub(function: Callable[..., Any]) -> bool:
    """Does a function do nothing but raise NotImplementedError? An assignment's adapter that nobody filled in offers nothing."""
    try:
        (node,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    except (OSError, SyntaxError, ValueError, TypeError):
        return False
    rest = [part for part in getattr(node, "body", []) if not isinstance(part, ast.Expr)]
    return len(rest) == 1 and isinstance(rest[0], ast.Raise) and "NotImplementedError" in ast.unparse(rest[0])


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


def start_of(wrapper: Any) -> Callable[..., Any] | None:
    """The call that begins a step, of the wrapper's own class; None for most, which need none."""
    for c in inspect.getmro(type(wrapper)):
        for name, method in vars(c).items() if not c.__module__.startswith("torch.") else ():
            sounds = any(word in name.lower() for word in START_WORDS) and not name.startswith("_")
            if sounds and inspect.isfunction(method) and _needs_no_argument(method):
                call: Callable[..., Any] = getattr(wrapper, name)
                return call
    return None


Call = Callable[..., Any] | None


def data_parallel_calls(module: ModuleType) -> tuple[Call, Call]:
    """`adapters.py` form: the functions called with (wrapped_model, optimizer) before a step and after a backward, if they are written.

    They belong to the function that makes the wrapper; a wrapper that is a class may have an after-backward of any name.
    """
    kinds = [kind for kind in DDP_KINDS if offered(getattr(module, f"get_{kind}", None))][:1]
    start = finish_function(module, [f"{kind}_on_train_batch_start" for kind in kinds])
    return start, finish_function(module, [f"{kind}_on_after_backward" for kind in (*kinds, *DDP_KINDS)])


def finish_function(module: ModuleType, names: Collection[str]) -> Callable[..., Any] | None:
    """`adapters.py` form: the first of these functions that is written, called with (wrapped_model, optimizer)."""
    for name in names:
        call = getattr(module, name, None)
        if offered(call):
            return call
    return None
