"""Saves links to files outside instead of files, and special files among them."""

# attacks: checkpoint.round_trip

import os

from wrong import *  # noqa: F403


def save_sharded(per_rank_state, dest_dir, step):
    os.makedirs(dest_dir, exist_ok=True)
    for rank in range(len(per_rank_state)):
        os.symlink("/etc/passwd", os.path.join(dest_dir, f"rank{rank}.bin"))
    os.mkfifo(os.path.join(dest_dir, "manifest"))
    os.symlink(dest_dir, os.path.join(dest_dir, "loop"))
