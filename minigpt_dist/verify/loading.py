"""Importing a submission by path, from any folder, as its author meant it and without letting it take anything over.

Owns finding the entry of a folder, relative imports and siblings, and stand-ins for packages that are not installed here and that the
pieces under judgement may never touch (triton, wandb, ...). Leaves what the module offers to `contract.py`.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from minigpt_dist.verify import as_written

ENTRIES = ("adapters.py", "__init__.py", "solution.py", "submission.py", "main.py")
MAX_STAND_INS = 20
# Layers that a course gives in a package of its own, and that a submission knows modules by: torch's stand for them.
TORCHS_LAYERS = ("Linear", "Embedding", "LayerNorm", "RMSNorm")
NEVER_SHADOWED = ("submission", "torch", "minigpt_dist")


def entry_of(path: Path) -> Path:
    """The file to load: the path itself, or a folder's entry. ValueError if there is none."""
    if path.is_file():
        return path
    if not path.is_dir():
        raise ValueError(f"implementation {str(path)!r} is not there")
    entries = [path / name for name in ENTRIES if (path / name).is_file()]
    single = sorted(path.glob("*.py"))
    if not entries and len(single) != 1:
        raise ValueError(
            f"folder {str(path)!r} has none of {', '.join(ENTRIES)}, but should have one, or a single .py file"
        )
    return entries[0] if entries else single[0]


def load_path(path: Path) -> tuple[ModuleType, list[str]]:
    """The module at `path`, and the names of packages, or of parts of torch, that a stand-in was made for.

    It is imported as part of a package `submission` that is its folder, so that `from .zero import X` and `from zero import X`
    both find its neighbours; the folder comes last on sys.path, so that a neighbour called json.py replaces nothing, unless what was
    found in its place lacks what the submission imports from it. An import that
    the submission itself guards (`try: import triton`) fails as it would without us; one that it does not guard gets a stand-in.
    """
    entry, before = entry_of(path.resolve()), {*sys.modules}
    sys.path.append(str(entry.parent))
    stood_in: list[str] = []
    shadowing: dict[str, Path] = {}
    compiled = as_written.install()
    while True:
        try:
            module = _execute(entry, shadowing)
            for name in _absent_in_functions(entry.parent, before):
                stood_in.append(name)
                _stand_in(name)
            return module, stood_in + [as_written.NAME] * compiled()
        except ImportError as error:
            name = error.name or ""
            top = name.split(".")[0]
            neighbour = None if top in shadowing or top in NEVER_SHADOWED else _neighbour(top, entry.parent)
            if neighbour is not None:
                shadowing[top] = neighbour
                continue
            absent = isinstance(error, ModuleNotFoundError) and _is_absent(top)
            if not absent or name in stood_in or len(stood_in) >= MAX_STAND_INS:
                raise
            stood_in.append(name)
            _stand_in(name)


def _absent_in_functions(folder: Path, before: set[str]) -> list[str]:
    """Modules that functions of the submission will import, unguarded, when they are called, and that are not here.

    before: names of modules that were there before it: they are not of its making (our own package, judged by us), or known from
    the last time.
    """
    found: dict[str, None] = {}
    modules = [m for name, m in sys.modules.items() if name.partition(".")[0] == "submission" or name not in before]
    for file in {f for m in modules if (f := getattr(m, "__file__", None)) and _lies_in(f, folder)}:
        try:
            tree = ast.parse(Path(file).read_bytes())
        except (OSError, SyntaxError, ValueError, RecursionError, TypeError):
            continue
        functions = [n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]
        for name in (name for function in functions for name in _imports(function)):
            top = name.split(".")[0]
            if top not in NEVER_SHADOWED and _is_absent(top) and _neighbour(top, folder) is None:
                found[name] = None
    return list(found)[:MAX_STAND_INS]


def _lies_in(file: str, folder: Path) -> bool:
    """Is this a file of the submission's own, rather than of an environment that lies in its folder?"""
    return file.startswith(f"{folder}/") and "site-packages" not in file and not file.startswith(f"{sys.prefix}/")


def _imports(function: ast.AST) -> Iterator[str]:
    """Modules that a function imports outside of any `try`, which would be a guard."""
    for node in ast.iter_child_nodes(function):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
        elif not isinstance(node, ast.Try):
            yield from _imports(node)


def _neighbour(top: str, folder: Path) -> Path | None:
    """The module of that name beside the entry, if there is one: another was found first, and lacks what the submission wants of it."""
    places = (folder / top / "__init__.py", folder / f"{top}.py")
    return next((place for place in places if top and place.is_file()), None)


def _is_absent(package: str) -> bool:
    """Is there no such package here at all? A missing part of one that is here is a mistake of the submission."""
    if package in ("", "submission"):
        return False
    known = sys.modules.get(package)
    return isinstance(known, _StandInModule) or (known is None and importlib.util.find_spec(package) is None)


def _execute(entry: Path, shadowing: dict[str, Path]) -> ModuleType:
    """Import `entry` anew as submission.<stem>, or as submission itself if it is a package's __init__.py.

    shadowing: neighbours to be found by their names in place of the library's modules.
    """
    for name in [n for n in sys.modules if n == "submission" or n.startswith("submission.")]:
        del sys.modules[name]
    is_package = entry.name == "__init__.py"
    if not is_package:
        package = ModuleType("submission")
        package.__path__ = [str(entry.parent)]
        sys.modules["submission"] = package
    for top, place in shadowing.items():
        _load(top, place)
    return _load("submission" if is_package else f"submission.{entry.stem}", entry)


def _load(name: str, place: Path) -> ModuleType:
    """Import the file at `place` under `name`, in place of whatever has that name."""
    for part in [n for n in sys.modules if n.startswith(f"{name}.")]:
        del sys.modules[part]
    locations = [str(place.parent)] if place.name == "__init__.py" else None
    spec = importlib.util.spec_from_file_location(name, place, submodule_search_locations=locations)
    if spec is None or spec.loader is None:
        raise ValueError(f"implementation {str(place)!r} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _stand_in(name: str) -> None:
    """Put a module under `name`, and under its parents, whose every attribute is a `StandIn`."""
    parts = name.split(".")
    for i in range(1, len(parts) + 1):
        full = ".".join(parts[:i])
        if full not in sys.modules:
            sys.modules[full] = _StandInModule(full)


class _StandInModule(ModuleType):
    """A module that has every attribute."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in TORCHS_LAYERS:
            return getattr(nn, name)
        return StandIn(f"{self.__name__}.{name}")


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
        return StandIn(f"{self._name}.{name}")

    def __getitem__(self, key: object) -> StandIn:
        return self

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __enter__(self) -> StandIn:
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return (object,) if all(isinstance(b, StandIn) for b in bases) else ()
