"""Ranks of one start find each other in a store that outlives starts, and after a loss tell who is still there.

A launcher's store keeps what an earlier start wrote: the addresses of ranks that are dead, under the very keys that the next start
reads, and a start that believes them connects to nobody. So the ranks first agree on a word that no other start has, and all that
follows is kept under it.

Owns both protocols, over any store of torch.distributed. Leaves the process group to `elastic`.
"""

from __future__ import annotations

import time
import uuid
from datetime import timedelta

# What torch.distributed has under the same names, but does not declare as its own.
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import DistStoreError

__all__ = ["NotMet", "Store", "TCPStore", "absent", "answer", "meet"]

LOOK_S = 0.01  # how often those who have not come are looked for


class NotMet(RuntimeError):  # noqa: N818 - what happened reads better than what it is
    """The ranks of a start did not all come in time. `lost`: those that rank 0 has not seen; of another rank, rank 0."""

    def __init__(self, lost: list[int], timeout_s: float) -> None:
        self.lost = lost
        super().__init__(f"the ranks did not meet in {timeout_s:g} s")


def meet(store: Store, rank: int, world_size: int, timeout_s: float) -> Store:
    """A part of `store` that only the `world_size` ranks of this start share. All ranks call it; NotMet after `timeout_s`.

    Rank r writes a name that it has just made up, and waits for an answer to that name: only a rank 0 that is there now can give it.
    Rank 0 answers every name it reads, also one that a dead rank has left, until all ranks say that they have heard.
    """
    if rank == 0:
        return PrefixStore(_gather(store, world_size, timeout_s), store)
    name = uuid.uuid4().hex
    store.set(f"here/{rank}", name)
    try:
        store.wait([f"answer/{name}"], timedelta(seconds=timeout_s))
    except DistStoreError as error:
        raise NotMet([0], timeout_s) from error
    word = store.get(f"answer/{name}").decode()
    store.set(f"heard/{word}/{rank}", "")
    return PrefixStore(word, store)


def _gather(store: Store, world_size: int, timeout_s: float) -> str:
    """Rank 0's part: a word that every other rank has heard."""
    word, awaited = uuid.uuid4().hex, list(range(1, world_size))
    deadline = time.monotonic() + timeout_s
    while awaited:
        for rank in awaited:
            if store.check([f"here/{rank}"]):
                store.set(f"answer/{store.get(f'here/{rank}').decode()}", word)
        awaited = [rank for rank in awaited if not store.check([f"heard/{word}/{rank}"])]
        if awaited and time.monotonic() > deadline:
            raise NotMet(awaited, timeout_s)
        if awaited:  # between two looks: the store can wait for all of its keys, but not say whose is missing
            time.sleep(LOOK_S)
    return word


def answer(store: Store, rank: int) -> None:
    """Tell the others that this rank is there, though it leaves: it is not the one they have lost."""
    store.set(f"answer/{rank}", "")


def absent(store: Store, rank: int, world_size: int, grace_s: float) -> list[int]:
    """The ranks that have not answered within `grace_s` seconds of this rank, which calls it when a collective failed.

    `store`: as `meet` gave it. Whoever still waits in a collective must first be woken: their connections closed.
    """
    answer(store, rank)
    keys = [f"answer/{other}" for other in range(world_size)]
    deadline = time.monotonic() + grace_s
    while not store.check(keys) and time.monotonic() < deadline:
        time.sleep(LOOK_S)  # between two looks, until the deadline: a wait of the store's would not name who is missing
    return [other for other, key in enumerate(keys) if not store.check([key])]
