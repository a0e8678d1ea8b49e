"""A checkpoint's files as bytes: how they leave one process and enter another, through the judge, and bring nothing else along.

Owns what of a folder is a checkpoint: regular files, folders and links by name and content, within limits; no attributes, no times.
"""

from __future__ import annotations

import os
from pathlib import Path

MOST_BYTES = 128 << 20
MOST_FILES = 10_000

Files = list[tuple[str, str, bytes]]  # path below the folder; "file", "link" or "folder"; content, or where it leads


def files_below(folder: Path) -> Files:
    """Everything below `folder`. ValueError if it is more than a checkpoint of this model can be."""
    found: Files = []
    total = 0
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found.append((name, "link", os.fsencode(os.readlink(path))))
        elif path.is_dir():
            found.append((name, "folder", b""))
        elif path.is_file():
            total += path.stat().st_size
            if total > MOST_BYTES or len(found) > MOST_FILES:
                raise ValueError(f"the checkpoint's folder holds more than {MOST_BYTES} bytes or {MOST_FILES} files")
            found.append((name, "file", path.read_bytes()))
    return found


def put_files(files: Files, folder: Path) -> None:
    """Make these files below `folder`."""
    for name, kind, content in files:
        place = folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        if kind == "folder":
            place.mkdir(exist_ok=True)
        elif kind == "link":
            place.symlink_to(os.fsdecode(content))
        else:
            place.write_bytes(content)
