"""What a sandbox contains: the interpreter, torch and what torch needs, a kit of this package, and one submission.

Owns finding these on the machine and copying the last. Everything else is kept out by absence, not by permission. Leaves the kit to
`kits.py`.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import stat
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Contents", "copy_submission", "interpreter_paths", "libraries"]

LIBRARIES = (
    *("torch", "torchgen", "functorch", "torch.libs", "nvidia", "triton"),
    *("numpy", "numpy.libs", "safetensors", "sympy", "mpmath", "typing_extensions.py"),
    *("filelock", "fsspec", "jinja2", "markupsafe", "networkx"),  # parts of torch that are asked for at import
)
ENTRIES = ("adapters.py", "__init__.py", "solution.py", "submission.py", "main.py")
FILES = ("/etc/ld.so.cache", "/etc/passwd", "/etc/group", "/etc/hosts", "/etc/localtime", "/etc/nsswitch.conf")
TMP_BYTES = 512 << 20  # of /tmp, and of /dev/shm
MOST_BYTES, MOST_FILES = 64 << 20, 4000
_IMPORTED = re.compile(rb"^\s*(?:from\s+\.*\s*([\w.]*)\s+import\s+([^#\n]*)|import\s+([^#\n]*))", re.MULTILINE)


@dataclass(frozen=True)
class Contents:
    """What to put in beside interpreter and torch.

    kit: dotted names of this package's modules; None for the whole package, which includes every answer. extra: more such names, for
    this sandbox alone, where the kit is shared.
    submission: the file or folder to judge, copied in read-only. preload: modules that the server imports before it forks ranks.
    """

    kit: tuple[str, ...] | None = None
    submission: Path | None = None
    preload: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()


def copy_submission(source: Path, target: Path) -> Path:
    """Copy a submission into `target` and return the path to load there. Regular files only, within `MOST_BYTES`.

    A folder is copied whole; a file named as an entry brings its folder along, any other file those neighbours that its text imports.
    Raises ValueError if it is not there or too large.
    """
    source = source.resolve()
    if source.is_dir():
        _copy_tree(source, target)
        return target
    if not source.is_file():
        raise ValueError(f"implementation {str(source)!r} is not there")
    if source.name in ENTRIES:
        _copy_tree(source.parent, target)
        return target / source.name
    for path in _with_neighbours(source):
        if path.is_dir():
            _copy_tree(path, target / path.name)
        else:
            _copy_files([path], path.parent, target)
    return target / source.name


def _with_neighbours(source: Path) -> list[Path]:
    """The file, and what lies beside it under a name that it, or one of these, imports."""
    found, waiting = [], [source]
    while waiting:
        path = waiting.pop()
        found.append(path)
        if path.is_dir() or path.stat().st_size > 1 << 20:
            continue
        for name in _imported(path.read_bytes()):
            for beside in (source.parent / f"{name}.py", source.parent / name):
                known = beside in found or beside in waiting
                if not known and (beside.is_file() or (beside / "__init__.py").is_file()):
                    waiting.append(beside)
    return found


def _imported(text: bytes) -> set[str]:
    names: set[str] = set()
    for match in _IMPORTED.finditer(text):
        for part in match.groups():
            names.update(word.decode(errors="replace") for word in re.findall(rb"\w+", part or b""))
    return names


def _copy_tree(source: Path, target: Path) -> None:
    files = []
    for folder, names, here in os.walk(source):
        names[:] = [n for n in names if not n.startswith(".") and n != "__pycache__"]
        files += [Path(folder) / name for name in here]
        if len(files) > MOST_FILES:
            raise ValueError(f"submission {str(source)!r} has more than {MOST_FILES} files")
    _copy_files(files, source, target)


def _copy_files(files: list[Path], source: Path, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    total = 0
    for path in files:
        about = path.lstat()
        if not stat.S_ISREG(about.st_mode):
            continue  # a link could lead anywhere
        total += about.st_size
        if total > MOST_BYTES:
            raise ValueError(f"submission {str(source)!r} has more than {MOST_BYTES} bytes")
        place = target / path.relative_to(source)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, place)


def libraries() -> list[Path]:
    """torch and what it imports, each a folder or file in a site-packages folder."""
    found = importlib.util.find_spec("torch")
    assert found is not None
    assert found.origin is not None
    site = Path(found.origin).parents[1]
    places = [site / name for name in LIBRARIES] + sorted(site.glob("torch-*.dist-info"))
    return [place for place in places if place.exists()]


def executable() -> Path:
    """The interpreter itself, outside any virtual environment."""
    return Path(getattr(sys, "_base_executable", None) or sys.executable).resolve()


def interpreter_paths() -> list[str]:
    """sys.path of the standard library alone."""
    paths = sysconfig.get_paths(vars={"base": sys.base_prefix, "platbase": sys.base_exec_prefix})
    standard = [paths["stdlib"], paths["platstdlib"], str(Path(paths["platstdlib"], "lib-dynload"))]
    return list(dict.fromkeys(standard))


def system_paths() -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """What every sandbox shows of the system: links (name, target), and places (source, target).

    The system's libraries, the interpreter, and the few files of /etc that libraries read.
    """
    links, places = [], [("/usr", "/usr")]
    for name in ("/lib", "/lib64", "/bin", "/sbin"):
        if os.path.islink(name):
            links.append((name, os.readlink(name)))
        elif os.path.isdir(name):
            places.append((name, name))
    places += [(os.path.realpath(file), file) for file in FILES if os.path.exists(file)]
    prefixes = {sys.base_prefix, str(executable().parents[1])}
    places += [(prefix, prefix) for prefix in sorted(prefixes) if not f"{prefix}/".startswith("/usr/")]
    return links, places


def hidden_paths() -> list[str]:
    """Folders of packages inside the interpreter's own tree: to be covered, whatever is installed there."""
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    prefixes = dict.fromkeys((sys.base_prefix, "/usr", "/usr/local"))
    places = [
        Path(p, "lib", v, d) for p in prefixes for v in (version, "python3") for d in ("site-packages", "dist-packages")
    ]
    return [str(place) for place in places if place.is_dir()]
