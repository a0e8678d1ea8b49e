"""One submission: where it lies, what it is called, what it holds, and whether it can be looked at at all.

Owns everything that is decided before any of it runs. Nothing is parsed or imported here: that is done on a rank. Leaves archives to
`archive`, and which paths are submissions to `cohort`.
"""

from __future__ import annotations

import hashlib
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from minigpt_dist.grading.archive import ArchiveError, extract
from minigpt_dist.verify.entries import entry_of

MAX_ENTRY = 4 << 20  # bytes of the file that is imported
MAX_BYTES, MAX_FILES, MAX_DEPTH = 64 << 20, 4000, 50
SPECS = ("fault:", "variant:", "peer:")
REFERENCE = "minigpt_dist"


@dataclass(frozen=True)
class Submission:
    """given: as the command line has it. spec: for `Subject`. error: why it cannot be graded, in one line; "" if it can be tried."""

    name: str
    given: str
    spec: str = ""
    entry: str = ""
    sha256: str = ""
    error: str = ""


def opened(name: str, given: str, scratch: Path) -> Submission:
    """Look at what lies at `given`; an archive is taken apart under `scratch`. A bad one has an `error`; nothing is raised."""
    if is_spec(given):
        return Submission(name, given, given, given, hashlib.sha256(given.encode()).hexdigest())
    try:
        path = Path(given)
        if path.suffix.lower() == ".zip" and not path.is_dir():
            path = only_folder(extract(path, scratch))
        entry = _entry(path)
        # A folder is loaded as one: its entry brings its neighbours along.
        spec = str(path.resolve())
        inside = str(entry.relative_to(path)) if path.is_dir() else entry.name
        return Submission(name, given, spec, inside, _digest(Path(given)))
    except (ArchiveError, ValueError) as error:
        return Submission(name, given, error=str(error).replace(str(scratch), given))
    except OSError as error:
        return Submission(name, given, error=f"it cannot be read: {error.strerror or error}")


def is_spec(given: str) -> bool:
    """Is this no path, but the package itself, or a planted fault or peer of it?"""
    return given == REFERENCE or given.startswith(SPECS)


def only_folder(path: Path) -> Path:
    """Where an archive holds one folder and nothing else, that folder; else `path`."""
    while True:
        inside = [p for p in path.iterdir() if not p.name.startswith((".", "__MACOSX"))]
        if len(inside) != 1 or not inside[0].is_dir() or inside[0].is_symlink():
            return path
        path = inside[0]


def _entry(path: Path) -> Path:
    """The file that will be imported, of a size that can be. ValueError if there is none."""
    if path.is_dir():
        _measure(path)
        if not any(path.iterdir()):
            raise ValueError("the folder is empty")
    entry = entry_of(path)
    mode, size = entry.stat().st_mode, entry.stat().st_size
    if not stat.S_ISREG(mode):
        raise ValueError(f"{entry.name} is no regular file")
    if entry.suffix != ".py":
        raise ValueError(f"{entry.name} is no Python file: hand in a .py file, a folder or a .zip")
    if size > MAX_ENTRY:
        raise ValueError(f"{entry.name} has {size} bytes, but should have at most {MAX_ENTRY}")
    with entry.open("rb"):  # readable by us, at least
        return entry


def _files(folder: Path) -> list[Path]:
    """Regular files under a folder, links not followed. ValueError beyond `MAX_FILES` or `MAX_DEPTH`."""
    found: list[Path] = []
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(f for f in folders if f not in ("__pycache__", ".git"))
        if len(Path(place).parts) > len(folder.parts) + MAX_DEPTH:
            raise ValueError(f"the folder has folders more than {MAX_DEPTH} deep")
        found += [Path(place, n) for n in sorted(names) if stat.S_ISREG(os.lstat(Path(place, n)).st_mode)]
        if len(found) > MAX_FILES:
            raise ValueError(f"the folder has more than {MAX_FILES} files")
    return found


def _measure(folder: Path) -> None:
    size = sum(path.lstat().st_size for path in _files(folder))
    if size > MAX_BYTES:
        raise ValueError(f"the folder has {size} bytes, but should have at most {MAX_BYTES}")


def _digest(path: Path) -> str:
    """sha256 of a file's bytes; of a folder, of the names and digests of its files."""
    if path.is_dir():
        rows = [f"{_digest(file)}  {file.relative_to(path)}\n" for file in _files(path)]
        return hashlib.sha256("".join(rows).encode(errors="surrogateescape")).hexdigest()
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
