"""Importing a submission by path, from any folder, as its author meant it and without letting it take anything over.

Owns relative imports and siblings, and when a package that is not here gets a stand-in (`stand_ins.py`). Leaves which files are loaded
to `entries.py`, and what the module offers to `contract.py`.
"""

from __future__ import annotations

import ast
import gc
import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import ModuleType

from minigpt_dist.verify import as_written
from minigpt_dist.verify.entries import entry_of, further_files
from minigpt_dist.verify.stand_ins import StandInModule, stand_in, stand_in_version

MAX_STAND_INS = 20
# Words in the names of functions and classes that belong to what is judged.
PIECES = ("ddp", "parallel", "fsdp", "shard", "zero", "optim")
NEVER_SHADOWED = ("submission", "torch", "minigpt_dist")


def load_path(path: Path) -> tuple[ModuleType, list[str]]:
    """The module at `path`, and the names of packages, or of parts of torch, that a stand-in was made for.

    It is imported as part of a package `submission` that is its folder, so that `from .zero import X` and `from zero import X`
    both find its neighbours; the folder comes last on sys.path, so that a neighbour called json.py replaces nothing, unless what was
    found in its place lacks what the submission imports from it. An import that
    the submission itself guards (`try: import triton`) fails as it would without us; one that it does not guard gets a stand-in.
    """
    path = path.resolve()
    gc.freeze = _freeze_nothing
    entry, before = entry_of(path), {*sys.modules}
    folder = path if path.is_dir() else entry.parent
    sys.path.extend(dict.fromkeys((str(entry.parent), str(folder))))
    stood_in: list[str] = []
    shadowing: dict[str, Path] = {}
    compiled = as_written.install()
    places = path if path.is_dir() and b"sys.path" in entry.read_bytes() else None
    module = _with_stand_ins(lambda: _execute(entry, shadowing), entry.parent, shadowing, stood_in, places)
    _prepare_later_imports(folder, before, stood_in)
    return module, stood_in + [as_written.NAME] * compiled()


def _freeze_nothing() -> None:
    """In place of gc.freeze: what the collector is told to pass over, a census of tensors would not see."""


def complete(module: ModuleType, path: Path, stood_in: list[str]) -> None:
    """Add to the module of a folder's entry what the folder's other files define, where it has no such name itself.

    A file that cannot be imported adds nothing: it may be a program that is not meant to be. Packages that it lacks join `stood_in`.
    """
    folder, before, compiled = path.resolve(), {*sys.modules}, as_written.install()
    for file in further_files(folder):
        place = file.relative_to(folder).with_suffix("").parts
        name = ".".join(place[:-1] if place[-1] == "__init__" else place)
        with suppress(Exception, SystemExit):
            found = _with_stand_ins(lambda name=name: importlib.import_module(name), folder, {}, stood_in)  # type: ignore[misc]
            if getattr(found, "__file__", None) == str(file):
                for attribute, value in vars(found).items():
                    vars(module).setdefault(attribute, value)
    _prepare_later_imports(folder, before, stood_in)
    if compiled() and as_written.NAME not in stood_in:
        stood_in.append(as_written.NAME)


def _with_stand_ins(
    load: Callable[[], ModuleType],
    folder: Path,
    shadowing: dict[str, Path],
    stood_in: list[str],
    places: Path | None = None,
) -> ModuleType:
    """What `load` gives, tried again with each package that it lacks stood in for. ImportError for what is no such lack.

    places: a folder in any part of which a module may lie that is not found, as the file puts parts of it on sys.path itself, by names
    that hold only where its author stood.
    """
    while True:
        try:
            return load()
        except ImportError as error:
            name = _wanted(error)
            top = name.split(".")[0]
            neighbour = None if top in shadowing or top in NEVER_SHADOWED else _neighbour(top, folder)
            if neighbour is not None:
                shadowing[top] = neighbour
                continue
            absent = (isinstance(error, ModuleNotFoundError) and _is_absent(top)) or _left_out(name)
            if absent and top == folder.name and top not in sys.modules:
                package = sys.modules[top] = ModuleType(
                    top
                )  # the folder is a package of the submission, by its own name
                package.__path__ = [str(folder)]
                continue
            part = _part_with(top, places) if absent and places is not None else None
            if part is not None and str(part) not in sys.path:
                sys.path.append(str(part))
                continue
            if not absent or name in stood_in or len(stood_in) >= MAX_STAND_INS:
                raise
            stood_in.append(name)
            if isinstance(error, PackageNotFoundError):
                stand_in_version(name)
            else:
                stand_in(name)


def _prepare_later_imports(folder: Path, before: set[str], stood_in: list[str]) -> None:
    """Import the submission's own modules that its pieces will import when they are called, and stand in for packages that are not here.

    before: names of modules that were there before it: they are not of its making (our own package, judged by us), or known from
    the last time. What cannot be imported is left to the call, which says so.
    """
    tried: set[str] = set()
    while fresh := [later for later in _later_imports(folder, before) if later[0] not in tried][:MAX_STAND_INS]:
        for name, of_a_piece in fresh:
            tried.add(name)
            top = name.split(".")[0]
            if top in NEVER_SHADOWED:
                continue
            if _is_absent(top) and _neighbour(top, folder) is None:
                stood_in.append(name)
                stand_in(name)
            elif of_a_piece and _lies_in(_place_of(name), folder):
                with suppress(Exception, SystemExit):
                    _with_stand_ins(lambda name=name: importlib.import_module(name), folder, {}, stood_in)  # type: ignore[misc]


def _place_of(name: str) -> str:
    """The file of a module, by its name; "" where there is none."""
    with suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(name)
        return str(spec.origin) if spec is not None else ""
    return ""


def _later_imports(folder: Path, before: set[str]) -> list[tuple[str, bool]]:
    """(module, whether that is a piece's) for each import, unguarded, in a function of the submission's modules."""
    found: dict[str, bool] = {}
    modules = [m for name, m in sys.modules.items() if name.partition(".")[0] == "submission" or name not in before]
    for file in {f for m in modules if (f := getattr(m, "__file__", None)) and _lies_in(f, folder)}:
        try:
            tree = ast.parse(Path(file).read_bytes())
        except (OSError, SyntaxError, ValueError, RecursionError, TypeError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                of_a_piece = any(word in node.name.lower() for word in PIECES)
                for name in _imports(node):
                    found[name] = found.get(name, False) or of_a_piece
    return list(found.items())


def _lies_in(file: str, folder: Path) -> bool:
    """Is this a file of the submission's own, rather than of the interpreter, or of an environment that lies in its folder?"""
    installed = (f"{sys.prefix}/", f"{sys.base_prefix}/")
    return file.startswith(f"{folder}/") and "site-packages" not in file and not file.startswith(installed)


def _imports(function: ast.AST) -> Iterator[str]:
    """Modules that a function imports outside of any `try`, which would be a guard."""
    for node in ast.iter_child_nodes(function):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
        elif not isinstance(node, ast.Try):
            yield from _imports(node)


def _is_name_of(top: str, folder: Path) -> bool:
    """Is this how the submission's files call the package that they lie in: does one of them import `top.X`, and is X there?"""
    wanted = re.compile(rb"\b(?:from|import)\s+%s\.(\w+)" % re.escape(top.encode()))
    parts = {part.decode() for file in sorted(folder.glob("*.py"))[:400] for part in wanted.findall(file.read_bytes())}
    return any(_neighbour(part, folder) for part in parts)


def _neighbour(top: str, folder: Path) -> Path | None:
    """The module of that name beside the entry, if there is one: another was found first, and lacks what the submission wants of it."""
    places = (folder / top / "__init__.py", folder / f"{top}.py")
    return next((place for place in places if top and place.is_file()), None)


def _part_with(top: str, folder: Path) -> Path | None:
    """The part of a folder that holds a module of that name, the shallowest."""
    found = [file.parent for file in sorted(folder.rglob(f"{top}.py")) if _lies_in(str(file), folder)]
    return min(found, key=lambda part: len(part.parts), default=None)


def _is_absent(package: str) -> bool:
    """Is there no such package here at all? A missing part of one that is here is a mistake of the submission."""
    if package in ("", "submission"):
        return False
    known = sys.modules.get(package)
    return isinstance(known, StandInModule) or (known is None and importlib.util.find_spec(package) is None)


def _wanted(error: ImportError) -> str:
    """The module that was not found, also where it was asked for as a name of its package."""
    found = re.match(r"cannot import name '(\w+)' from '([\w.]+)'", str(error))
    return f"{found[2]}.{found[1]}" if found else error.name or ""


def _left_out(name: str) -> bool:
    """Is this a module of a package of the submission's own, that was not handed in? One that an installed package lacks is a mistake."""
    package = sys.modules.get(name.rpartition(".")[0])
    return any(_lies_in(place, Path(place).parent) for place in getattr(package, "__path__", ()))


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
