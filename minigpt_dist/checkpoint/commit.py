"""How a checkpoint appears and disappears in one stroke, so that a kill at any point leaves the old one or the new.

    root/latest                          which folder counts, and the checksum of its manifest
    root/step-00000010/                  a complete checkpoint; `step-00000010.1` if step 10 is saved again
    root/.tmp-1f0c.../step-00000010/     one that is being written, or removed

Everything unfinished lives in a workspace, a `.tmp-` folder that its owner keeps locked: one rename takes a
checkpoint out of it, one takes an outdated checkpoint into it. A workspace that nobody has locked is what a killed
save left; the next save sweeps it. Saving a step again takes a fresh name, moves the pointer, then removes the old.

Owns folder names, the pointer `latest`, and the order of fsync and rename. Leaves what is in a checkpoint to others.
"""

from __future__ import annotations

import errno
import itertools
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from minigpt_dist.checkpoint.errors import mismatch, naming_file
from minigpt_dist.checkpoint.files import fsync_folder, read_small, write_file
from minigpt_dist.checkpoint.lock import Hold, hold
from minigpt_dist.checkpoint.manifest import MANIFEST_NAME, Manifest

__all__ = [
    "POINTER_NAME",
    "STEP_FOLDER",
    "commit",
    "discard",
    "payload_of",
    "read_pointer",
    "step_folders",
    "step_name",
    "workspace",
]

POINTER_NAME = "latest"
TMP_PREFIX = ".tmp-"
STEP_FOLDER = re.compile(r"step-(\d{8,18})(?:\.(\d{1,9}))?", re.ASCII)
POINTER_TEXT = re.compile(rf"({STEP_FOLDER.pattern})\nsha256 ([0-9a-f]{{64}})\n", re.ASCII)
MAX_STEP = 10**18


def step_name(step: int) -> str:
    """The folder name of `step`. ValueError unless it is an int in [0, 10**18)."""
    if type(step) is not int or not 0 <= step < MAX_STEP:
        raise ValueError(f"step is {step!r}, but should be an int in [0, 10**18)")
    return f"step-{step:08d}"


def step_folders(root: Path) -> list[Path]:
    """The checkpoint folders in `root`, oldest step first; whether they are good is not looked at."""
    found = []
    for entry in os.scandir(root):
        match = STEP_FOLDER.fullmatch(entry.name)
        if match and entry.is_dir(follow_symlinks=False):
            found.append((int(match[1]), int(match[2] or 0), root / entry.name))
    return [folder for _, _, folder in sorted(found)]


@contextmanager
def workspace(root: Path) -> Iterator[Path]:
    """A fresh, locked temporary folder in `root` (made if missing), removed with all its content at the end.

    What killed saves left in `root` is swept first. Raises CheckpointError naming file and cause.
    """
    with ExitStack() as stack:
        with naming_file(root, "to make a temporary folder in it"):
            _make_root(root)
            _sweep(root)
            path = _locked_folder(root, stack)
        try:
            yield path
        except BaseException:
            with suppress(OSError):  # the first error is the one to tell; what stays here is swept by the next save
                shutil.rmtree(path)
            raise
        with naming_file(path, "to remove it"):
            shutil.rmtree(path)


def payload_of(temporary: Path, step: int) -> Path:
    """Where in a workspace the checkpoint of `step` is written."""
    return temporary / step_name(step)


def commit(temporary: Path, manifest: Manifest) -> Path:
    """Makes the shards in the workspace the latest checkpoint of its root; returns the new folder.

    On return all of it is durable. On CheckpointError `latest` names a complete checkpoint, this one or the old.
    """
    root, payload = temporary.parent, payload_of(temporary, manifest.step)
    with naming_file(root, "to commit a checkpoint"), hold(payload):
        outdated = [f for f in step_folders(root) if f.name.split(".")[0] == payload.name]
        # The hold keeps a concurrent save or clean-up from removing the folder before `latest` names it.
        text = manifest.to_json().encode()
        write_file(payload / MANIFEST_NAME, len(text), iter([memoryview(text)]))
        fsync_folder(payload)
        folder = _publish(payload, root)
        try:
            _point(root, folder, manifest, temporary)
        except BaseException:
            with suppress(Exception):  # keep the first error; an unnamed, complete folder does no harm
                if not _is_latest(root, folder):
                    os.rename(folder, payload)
            raise
        discard(outdated, temporary)
    return folder


def discard(folders: list[Path], temporary: Path) -> list[Path]:
    """Moves `folders` into the workspace, whose end removes them; those in use are left. Returns those moved."""
    moved = []
    for i, folder in enumerate(folders):
        with suppress(FileNotFoundError), hold(folder) as held:  # another save may have been faster
            if held is not Hold.BUSY:
                os.rename(folder, temporary / f"outdated-{i}")
                moved.append(folder)
    if moved:
        fsync_folder(temporary.parent)
    return moved


def read_pointer(root: Path) -> tuple[Path, str]:
    """The folder that `latest` names, and the checksum its manifest must have.

    Raises:
        CheckpointError: no pointer, or one that is not exactly what `commit` writes.
    """
    file = root / POINTER_NAME
    text = read_small(file, 4096)
    match = POINTER_TEXT.fullmatch(text)
    if not match:
        raise mismatch(file, "a folder step-NNNNNNNN and a sha256", repr(text[:80]))
    return root / match[1], match[4]


def _make_root(root: Path) -> None:
    if not root.is_dir():
        os.makedirs(root, exist_ok=True)
        fsync_folder(root.parent)


def _sweep(root: Path) -> None:
    """Removes workspaces whose owner is dead. One that cannot be removed must not stop a save."""
    for entry in os.scandir(root):
        if entry.name.startswith(TMP_PREFIX) and entry.is_dir(follow_symlinks=False):
            with suppress(OSError), hold(Path(entry.path)) as held:
                if held is Hold.OURS:
                    shutil.rmtree(entry.path)


def _locked_folder(root: Path, stack: ExitStack) -> Path:
    """A new folder in `root`, locked until `stack` unwinds."""
    while True:
        path = root / f"{TMP_PREFIX}{secrets.token_hex(8)}"
        os.mkdir(path)
        try:
            # A sweep that came between making and locking may have taken it for a dead one: then take another.
            with suppress(FileNotFoundError):
                if stack.enter_context(hold(path)) is not Hold.BUSY and path.exists():
                    return path
        except BaseException:
            with suppress(OSError):
                os.rmdir(path)
            raise


def _publish(payload: Path, root: Path) -> Path:
    """Renames the finished folder to the first free name of its step. A rename never replaces a non-empty folder."""
    for again in itertools.count():
        folder = root / (payload.name + (f".{again}" if again else ""))
        try:
            os.rename(payload, folder)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
        else:
            fsync_folder(root)
            return folder
    raise AssertionError("itertools.count ended")


def _point(root: Path, folder: Path, manifest: Manifest, temporary: Path) -> None:
    """Makes `latest` name `folder`, by one rename of a file that is already durable."""
    text = f"{folder.name}\nsha256 {manifest.checksum}\n".encode()
    write_file(temporary / POINTER_NAME, len(text), iter([memoryview(text)]))
    os.replace(temporary / POINTER_NAME, root / POINTER_NAME)
    fsync_folder(root)


def _is_latest(root: Path, folder: Path) -> bool:
    return os.path.lexists(root / POINTER_NAME) and read_pointer(root)[0] == folder
