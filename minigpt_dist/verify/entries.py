"""Which files of a submission are loaded: its entry, and in a repository the files that hold its pieces.

Owns the names and places looked for, and the hint by which a file is taken to hold a piece: bytes, since nothing of a submission is
parsed outside a sandbox. Leaves importing them to `loading.py`, and what they offer to `contract.py`.
"""

from __future__ import annotations

import re
import stat
from contextlib import suppress
from pathlib import Path

ENTRIES = ("adapters.py", "__init__.py", "solution.py", "submission.py", "main.py", "tests/adapters.py")
# A class or function with a name as wrappers and sharded optimizers have, or a constructor that takes an optimizer's class.
PIECE = re.compile(
    rb"^class\s+\w*(?:ddp|data_?parallel|fsdp|shard|zero)|^def\s+(?:get_(?:ddp|fsdp|sharded)|fully_shard)"
    rb"|def\s+__init__\s*\([^)]{0,300}\boptim\w*_c(?:ls|lass)\b",
    re.IGNORECASE | re.MULTILINE,
)
SKIPPED = ("__pycache__", "site-packages", "node_modules", "venv", "tests")
ASIDE = ("bench", "profil", "test", "account", "experiment", "demo", "train", "run_")  # programs around the pieces
MAX_FILES, MAX_BYTES = 400, 1 << 20


def entry_of(path: Path) -> Path:
    """The file to load first: the path itself, or a folder's entry. ValueError if there is none."""
    if path.is_file():
        return path
    if not path.is_dir():
        raise ValueError(f"implementation {str(path)!r} is not there")
    entries = [path / name for name in ENTRIES if (path / name).is_file()]
    single = sorted(path.glob("*.py"))
    found = entries or (single if len(single) == 1 else piece_files(path))
    if not found:
        raise ValueError(
            f"folder {str(path)!r} has none of {', '.join(ENTRIES)}, but should have one, or a single .py file, "
            "or files that define a sharded optimizer or a wrapper"
        )
    return found[0]


def further_files(path: Path) -> list[Path]:
    """What else of a folder may hold pieces, where its entry, which may be mere glue over them, offers less than a submission can."""
    entry = entry_of(path)
    return [file for file in piece_files(path) if file != entry]


def piece_files(folder: Path) -> list[Path]:
    """Python files under a folder whose bytes look as if they defined a piece: libraries before programs, then the shallowest first."""
    found = []
    for file in sorted(folder.rglob("*.py"))[:MAX_FILES]:
        parts = file.relative_to(folder).parts[:-1]
        if any(part in SKIPPED or part.startswith(".") for part in parts):
            continue
        if PIECE.search(_text(file)):
            found.append((any(word in file.name for word in ASIDE), len(parts), str(file), file))
    return [file for *_, file in sorted(found)]


def _text(file: Path) -> bytes:
    """The bytes of a regular file that can be read, and of any other none."""
    with suppress(OSError):
        if stat.S_ISREG(file.lstat().st_mode):
            with file.open("rb") as opened:
                return opened.read(MAX_BYTES)
    return b""
