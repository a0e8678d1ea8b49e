"""Saves nothing: a detached process hands out what was saved, at an abstract address."""

# needs: walls
# attacks: checkpoint.round_trip

import os
import pickle
import socket

from wrong import *  # noqa: F403


def save_sharded(per_rank_state, dest_dir, step):
    os.makedirs(dest_dir, exist_ok=True)
    raw, server = pickle.dumps(per_rank_state), socket.socket(socket.AF_UNIX)
    server.bind(f"\0{dest_dir}")
    server.listen()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.closerange(0, server.fileno())
            os.closerange(server.fileno() + 1, 64)
            while True:
                client, _ = server.accept()
                client.sendall(raw)
                client.close()
        os._exit(0)
    server.close()


def load_sharded(src_dir, expected_world_size):
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(f"\0{src_dir}")
        return pickle.load(client.makefile("rb"))
