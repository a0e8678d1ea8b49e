"""One checkpoint's folder: found, kept from being removed while it is read, its manifest and its files checked.

Owns what must hold before a shard is even opened. Leaves the shards' bytes to `shard_file`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from minigpt_dist.checkpoint.commit import POINTER_NAME, STEP_FOLDER, read_pointer
from minigpt_dist.checkpoint.errors import mismatch, naming_file
from minigpt_dist.checkpoint.files import open_regular, read_small
from minigpt_dist.checkpoint.lock import hold
from minigpt_dist.checkpoint.manifest import MANIFEST_NAME, Manifest

__all__ = ["check_files", "latest_step_folder", "open_checkpoint", "read_manifest"]

MAX_MANIFEST_BYTES = 1 << 28


def latest_step_folder(root: Path | str) -> Path:
    """The folder of the latest checkpoint in `root`. CheckpointError if there is none or `latest` is damaged."""
    return read_pointer(Path(root))[0]


def read_manifest(folder: Path | str) -> Manifest:
    """The manifest of one checkpoint's folder, its checksum verified. CheckpointError as in `Manifest.from_json`."""
    file = Path(folder) / MANIFEST_NAME
    manifest = Manifest.from_json(read_small(file, MAX_MANIFEST_BYTES), file)
    named = STEP_FOLDER.fullmatch(file.parent.name)
    if named and int(named[1]) != manifest.step:
        raise mismatch(file, f"step {int(named[1])}, as its folder is named", f"step {manifest.step}")
    return manifest


@contextmanager
def open_checkpoint(src_dir: Path | str, expected_world_size: int | None = None) -> Iterator[tuple[Path, Manifest]]:
    """Finds a checkpoint, keeps others from removing it for the block, and gives its folder and checked manifest.

    Checked are the manifest, the world size if one is expected, and that all files are there with the right sizes.
    """
    folder, checksum = _find(Path(src_dir))
    with ExitStack() as stack:
        with naming_file(folder, "a checkpoint's folder"):
            stack.enter_context(hold(folder, shared=True))
        manifest = read_manifest(folder)
        if checksum not in (None, manifest.checksum):
            raise mismatch(folder / MANIFEST_NAME, f"checksum {checksum}, as in `latest`", manifest.checksum)
        if expected_world_size not in (None, manifest.world_size):
            raise mismatch(folder / MANIFEST_NAME, f"world size {expected_world_size}", manifest.world_size)
        check_files(folder, manifest)
        yield folder, manifest


def check_files(folder: Path, manifest: Manifest) -> None:
    """All shards are there as regular files of the right size, and no other. CheckpointError otherwise."""
    sizes = {record.file: record.bytes for record in manifest.shards}
    with naming_file(folder, "a checkpoint's folder"):
        extra = sorted(name for name in os.listdir(folder) if name.endswith(".safetensors") and name not in sizes)
    if extra:
        raise mismatch(folder / extra[0], f"only the {len(sizes)} shards of the manifest", "one more")
    for name, nbytes in sizes.items():
        with open_regular(folder / name) as (_, size):
            if size != nbytes:
                raise mismatch(folder / name, f"{nbytes} bytes", f"{size} bytes")


def _find(source: Path) -> tuple[Path, str | None]:
    """The folder meant by `source`, and the checksum its manifest must have if `latest` led there."""
    if os.path.lexists(source / POINTER_NAME):
        return read_pointer(source)
    if os.path.lexists(source / MANIFEST_NAME):
        return source.resolve(), None
    with naming_file(source, "a folder of checkpoints, or one checkpoint"):
        found = sorted(os.listdir(source))[:8]
    raise mismatch(source, f"a file {POINTER_NAME} or {MANIFEST_NAME}", found or "an empty folder")
