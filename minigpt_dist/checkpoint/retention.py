"""Removing old checkpoints without ever removing the last good one.

Owns which checkpoints go. Leaves how a folder goes to `commit`, what good means to `verify`.
"""

from __future__ import annotations

from pathlib import Path

from minigpt_dist.checkpoint.commit import POINTER_NAME, discard, read_pointer, step_folders, workspace
from minigpt_dist.checkpoint.errors import CheckpointError, naming_file, need_count
from minigpt_dist.checkpoint.verify import Mode, verify_checkpoint

__all__ = ["keep_last"]


def keep_last(root: Path | str, k: int, mode: Mode = "full") -> list[Path]:
    """Removes all checkpoints in `root` older than the `k` newest good ones, and returns the removed folders.

    Damaged ones do not count: with fewer than `k` good ones nothing is removed. Kept as well: the one that `latest`
    names, all newer than the oldest kept, and any that is being read or written.

    Args:
        mode: how closely the ones to keep are checked, as in `verify_checkpoint`.

    Raises:
        ValueError: `k` is not an int of at least 1.
        CheckpointError: the disk refused; or `latest` is damaged, and it cannot be known what to keep.
    """
    need_count("k", k)
    root = Path(root)
    with naming_file(root, "a folder of checkpoints"):
        folders = step_folders(root)
    old = _older_than_good(folders, k, mode)
    if (root / POINTER_NAME).exists():
        latest = read_pointer(root)[0]
        old = [folder for folder in old if folder != latest]
    if not old:
        return []
    with workspace(root) as temporary, naming_file(root, "to remove old checkpoints"):
        return discard(old, temporary)


def _older_than_good(folders: list[Path], k: int, mode: Mode) -> list[Path]:
    """The part of `folders` (oldest first) before the k-th good one, counted from the end; none if there are fewer."""
    good = 0
    for i in range(len(folders) - 1, 0, -1):
        try:
            verify_checkpoint(folders[i], mode)
        except CheckpointError:
            continue
        good += 1
        if good == k:
            return folders[:i]
    return []
