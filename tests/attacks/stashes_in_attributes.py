"""Saves empty files: what was saved is in their extended attributes."""

# needs: walls
# attacks: checkpoint.round_trip

import os
import pickle

from wrong import *  # noqa: F403


def save_sharded(per_rank_state, dest_dir, step):
    os.makedirs(dest_dir, exist_ok=True)
    raw = pickle.dumps(per_rank_state)
    for at in range(0, len(raw), 4000):
        path = os.path.join(dest_dir, f"{at:09d}")
        open(path, "w").close()
        os.setxattr(path, "user.kept", raw[at : at + 4000])


def load_sharded(src_dir, expected_world_size):
    parts = [os.getxattr(os.path.join(src_dir, name), "user.kept") for name in sorted(os.listdir(src_dir))]
    return pickle.loads(b"".join(parts))
