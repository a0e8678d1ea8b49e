"""A function by reference: the module, the file and the name under which another process finds it.

Owns what may be sent to a rank, and finding it there, also where the file's folder is no package and not on the path.
Leaves sending to `world`.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple, cast

__all__ = ["Reference", "refer", "resolve"]


class Reference(NamedTuple):
    """Where a function lives: importable `module`, its `file` where it has one, and the dotted `name` inside."""

    module: str
    file: str | None
    name: str


def refer(body: Callable[..., object]) -> Reference:
    """Describe a module-level function.  Raises ValueError for anything a fresh process could not look up by name."""
    name, module_name = getattr(body, "__qualname__", None), getattr(body, "__module__", None)
    if not callable(body) or not isinstance(name, str) or not isinstance(module_name, str) or "<" in name:
        raise ValueError(f"body is {body!r}, expected a function defined at the top level of a module")
    module = sys.modules.get(module_name)
    found: object = module
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is not body:
        raise ValueError(f"body is {body!r}, but {module_name}.{name} is {found!r}: expected the same function")
    file = getattr(module, "__file__", None)
    file = os.path.abspath(file) if file else None
    if module_name == "__main__":
        spec = getattr(module, "__spec__", None)  # set under `python -m`, and then it holds the real name
        module_name = spec.name if spec else module_name
        if not spec and not file:
            raise ValueError(f"body is {body!r} of an interactive session, expected a function in a file")
    return Reference(module_name, file, name)


def resolve(reference: Reference) -> Callable[..., Any]:
    """Import what `refer` described, in this process.  Raises what the import raises."""
    found: Any = _module(reference)
    for part in reference.name.split("."):
        found = getattr(found, part)
    return cast("Callable[..., Any]", found)


def _module(reference: Reference) -> ModuleType:
    name, file = reference.module, reference.file
    if file is None:
        return importlib.import_module(name)
    if name != "__main__":
        loaded = sys.modules.get(name)
        if loaded is not None and _same(getattr(loaded, "__file__", None), file):
            return loaded
        if _same(_origin(name), file):
            return importlib.import_module(name)
    return _load(name, file)


def _origin(name: str) -> str | None:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):  # no such parent package, or a module without a spec
        return None
    return spec.origin if spec else None


def _same(left: str | None, right: str) -> bool:
    return left is not None and os.path.exists(left) and os.path.samefile(left, right)


def _load(name: str, file: str) -> ModuleType:
    """Run the file as a module of that name; a script runs as `__mp_main__`, so that its main guard stays shut."""
    alias = "__mp_main__" if name == "__main__" else name
    spec = importlib.util.spec_from_file_location(alias, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is no Python source file", name=name, path=file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = sys.modules[alias] = module
    spec.loader.exec_module(module)
    return module
