"""One side of a refactor check: where an implementation lies in a tree of files.

Owns finding it: a checkout with the package, the package's own folder, or a file or folder of the contract. Imports no
torch and runs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

PACKAGE = "minigpt_dist"
ENTRIES = ("__init__.py", "solution.py", "submission.py", "main.py")
A_FOLDER = f"a folder with one of {', '.join(ENTRIES)}"


@dataclass(frozen=True)
class Side:
    """One implementation. root: the folder to import `minigpt_dist` from, if not this installation. path: a file or folder of
    the contract; None: the package itself is the implementation."""

    label: str
    root: Path | None
    path: Path | None = None


def side_at(label: str, place: Path, impl: str | None = None) -> Side:
    """The implementation in `place`, at `impl` inside it if that is given. ValueError, in one line, if none is there."""
    place = place.resolve()
    root = place if (place / PACKAGE / "__init__.py").is_file() else None
    if impl is not None:
        if not _contract(place / impl):
            raise ValueError(f"{label} is without {impl!r}, but should have a Python file, or {A_FOLDER}, there")
        return Side(label, root, place / impl)
    if root is not None:
        return Side(label, root)
    if place.name == PACKAGE and (place / "__init__.py").is_file():
        return Side(label, place.parent)
    if not _contract(place):
        raise ValueError(
            f"{label} is without the package {PACKAGE}, but should hold it, or be a Python file or {A_FOLDER}"
        )
    return Side(label, None, place)


def _contract(path: Path) -> bool:
    if path.is_dir():
        return any((path / entry).is_file() for entry in ENTRIES) or len(list(path.glob("*.py"))) == 1
    return path.is_file() and path.suffix == ".py"
