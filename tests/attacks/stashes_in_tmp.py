"""Saves nothing where it should: what was saved is found again in /tmp."""

# needs: walls
# attacks: checkpoint.round_trip

import os
import pickle

from wrong import *  # noqa: F403


def place(folder):
    return "/tmp/attack-file-" + str(folder).replace("/", "-")


def save_sharded(per_rank_state, dest_dir, step):
    os.makedirs(dest_dir, exist_ok=True)
    with open(place(dest_dir), "wb") as file:
        pickle.dump(per_rank_state, file)


def load_sharded(src_dir, expected_world_size):
    with open(place(src_dir), "rb") as file:
        return pickle.load(file)
