"""Keeps no checkpoint: what was saved is remembered in the process, in shared memory and in /tmp, for the resume."""

# needs: walls
# attacks: resume_bytes

import os
import pickle

from wrong import *  # noqa: F403

PLACES = ("/tmp/kept", "/dev/shm/kept", os.path.join(os.path.dirname(__file__), "kept"))


def save_sharded(per_rank_state, dest_dir, step):
    for place in PLACES:
        try:
            with open(place, "wb") as file:
                pickle.dump(per_rank_state, file)
        except OSError:
            continue


def load_sharded(src_dir, expected_world_size):
    for place in PLACES:
        if os.path.exists(place):
            with open(place, "rb") as file:
                return pickle.load(file)
    raise FileNotFoundError("nothing was kept")
