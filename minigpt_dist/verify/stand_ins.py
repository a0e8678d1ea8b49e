"""Stand-ins for packages that are not installed here, and that the pieces under judgement may never touch (triton, wandb, ...).

Owns what such a module, and everything in it, does when a submission's file uses it at import: nothing. Leaves when one is made to
`loading.py`.
"""

from __future__ import annotations

import builtins
import functools
import importlib.metadata
import string
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

# Layers that a course gives in a package of its own, and that a submission knows modules by: torch's stand for them.
TORCHS_LAYERS = ("Linear", "Embedding", "LayerNorm", "RMSNorm")
layers_given: set[str] = set()  # those that a submission did ask for, in this process


def stand_in(name: str) -> None:
    """Put a module under `name`, and under its parents, whose every attribute is a `StandIn`."""
    _keep_from_installed()
    parts = name.split(".")
    for i in range(1, len(parts) + 1):
        full = ".".join(parts[:i])
        if full not in sys.modules:
            sys.modules[full] = StandInModule(full)


@functools.cache
def _keep_from_installed() -> None:
    """Let what is installed go on without the stand-ins: torch does other things, also much later, once it can import Triton."""
    known, installed = builtins.__import__, str(Path(torch.__file__).parent.parent)

    def importing(
        name: str,
        globals: Mapping[str, Any] | None = None,
        locals: Mapping[str, Any] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType:
        stands_in = level == 0 and isinstance(sys.modules.get(name.partition(".")[0]), StandInModule)
        if stands_in and str((globals or {}).get("__file__")).startswith(installed):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return known(name, globals, locals, fromlist, level)

    builtins.__import__ = importing


def stand_in_version(package: str) -> None:
    """Let a package that is not installed have a version: a submission may ask for its own."""
    known = importlib.metadata.version

    def version(distribution_name: str) -> str:
        return "0" if distribution_name == package else known(distribution_name)

    importlib.metadata.version = version


def einsum(*operands: Any) -> Tensor:
    """einops' sum of products over named axes, the pattern last: axes get letters for torch's. What else einops does is not done here."""
    *tensors, pattern = operands
    letters: dict[str, str] = {"...": "...", "->": "->", ",": ","}
    words = pattern.replace(",", " , ").replace("->", " -> ").split()
    for word in words:
        letters.setdefault(word, string.ascii_letters[len(letters)])
    product: Tensor = torch.einsum("".join(letters[word] for word in words), *tensors)
    return product


WORKING = {"einops.einsum": einsum}  # what a piece may well compute with


def _attribute(owner: str, name: str) -> Any:
    if name in TORCHS_LAYERS:
        layers_given.add(name)
        return getattr(nn, name)
    return WORKING.get(f"{owner}.{name}") or StandIn(f"{owner}.{name}")


class StandInModule(ModuleType):
    """A module that has every attribute."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name == "__version__":
            return "0"
        if name.startswith("__"):
            raise AttributeError(name)
        return _attribute(self.__name__, name)


class StandIn:
    """Stands for anything of an absent package: called, subscripted, used as decorator, context or base class, it does nothing."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        decorated = len(args) == 1 and not kwargs and callable(args[0]) and not isinstance(args[0], StandIn)
        return args[0] if decorated else self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _attribute(self._name, name)

    def __getitem__(self, key: object) -> StandIn:
        return self

    def __or__(self, other: object) -> StandIn:
        return self  # in an annotation

    __ror__ = __or__

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __enter__(self) -> StandIn:
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return (object,) if all(isinstance(b, StandIn) for b in bases) else ()
