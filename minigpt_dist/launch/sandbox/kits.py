"""Kits: the modules of this package that a sandbox holds, with all that these import, copied out of the package.

Owns following imports and copying. What a kit is for, and so which modules it begins with, is said by whoever asks for one; the least is
`launch_kit`, with which ranks are served.
"""

from __future__ import annotations

import ast
import functools
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

__all__ = ["PACKAGE", "closure", "copy_kit", "launch_kit", "open_to_all"]

PACKAGE = Path(__file__).parents[2]
# What serves ranks begins with these: some are imported in functions, which `closure` does not follow.
_SERVES = tuple(f"{PACKAGE.name}.launch.{name}" for name in ("server", "rank", "ledger", "stem", "trial"))


@functools.cache
def launch_kit() -> tuple[str, ...]:
    """The modules that serve ranks in any sandbox: dotted names."""
    return closure(_SERVES)


def closure(names: Iterable[str], functions: bool = False) -> tuple[str, ...]:
    """The modules of this package among `names`, and all of it that these import as they are loaded: dotted names, sorted.

    Of a package among `names`, every module. functions: also what is imported only as a function is called.
    """
    found: set[str] = set()
    waiting = {module for name in names for module in _modules(name)}
    while waiting:
        found.add(name := waiting.pop())
        waiting |= _imported(name, functions) - found
    return tuple(sorted(found))


def _modules(name: str) -> list[str]:
    """The module, or the modules of the package, called `name`."""
    folder = PACKAGE.joinpath(*name.split(".")[1:])
    files = [path.relative_to(PACKAGE).with_suffix("") for path in folder.rglob("*.py") if path.stem != "__init__"]
    return [name, *(".".join((PACKAGE.name, *file.parts)) for file in files)]


@functools.cache
def _imported(name: str, functions: bool) -> frozenset[str]:
    """The modules of this package that a module imports."""
    file = PACKAGE.joinpath(*name.split(".")[1:])
    tree = ast.parse((file / "__init__.py" if file.is_dir() else file.with_suffix(".py")).read_bytes())
    found: set[str] = set()
    for node in ast.walk(tree) if functions else tree.body:
        if isinstance(node, ast.ImportFrom) and node.module:
            found.update({node.module, *(f"{node.module}.{alias.name}" for alias in node.names)})
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
    return frozenset(name for name in found if name.startswith(f"{PACKAGE.name}.") and _is_file(name))


def _is_file(name: str) -> bool:
    return PACKAGE.joinpath(*name.split(".")[1:]).with_suffix(".py").is_file()


def copy_kit(modules: tuple[str, ...] | None, target: Path) -> None:
    """Copy this package, or the `modules` of it and the packages they lie in, to target/<package>."""
    if modules is None:
        shutil.copytree(PACKAGE, target / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
        return
    wanted = {Path("__init__.py")}
    for name in modules:
        parts = name.split(".")[1:]
        wanted.update(Path(*parts[:i], "__init__.py") for i in range(1, len(parts)))
        inside = [path.relative_to(PACKAGE) for path in sorted(PACKAGE.joinpath(*parts).rglob("*.py"))]
        wanted.update(inside or [Path(*parts).with_suffix(".py")])
    for file in sorted(wanted):
        place = target / PACKAGE.name / file
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(PACKAGE / file, place)


def open_to_all(folder: Path) -> None:
    """Let every user read what is in a copied folder."""
    for place, _, names in os.walk(folder):
        os.chmod(place, 0o755)
        for name in names:
            os.chmod(Path(place, name), 0o644)
