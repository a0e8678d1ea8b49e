"""Being a rank that torch elastic (`torchrun`) has started: join its world, leave it in order.

Owns the process group's life under a launcher that is not ours.  Leaves starting and restarting ranks to elastic.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from minigpt_dist.launch import ledger
from minigpt_dist.launch.device import choose_backend
from minigpt_dist.launch.errors import LaunchError, RanksLost
from minigpt_dist.launch.meeting import NotMet, Store, TCPStore, absent, answer, meet
from minigpt_dist.launch.parent import die_with_parent

__all__ = ["attach_elastic", "under_torchrun"]

_RENDEZVOUS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
JOIN_S = 120.0  # for all ranks of a start to come: an interpreter's start on a busy machine takes long
GRACE_S = 2.0  # between the first rank's loss of a peer and the last one's
Answer = TypeVar("Answer")


def under_torchrun() -> bool:
    """Whether a launcher has told this process its place: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are all set."""
    return all(name in os.environ for name in _RENDEZVOUS)


@contextmanager
def attach_elastic(
    backend: str | None = None, device: str = "cpu", timeout_s: float = 600.0
) -> Iterator[tuple[int, int]]:
    """Join the world that the environment describes, yield (rank, world_size), leave it at the end.

    The process ends with its launcher (on Linux): a rank whose agent was killed must not go on in a world that forms anew.

    Args:
        backend: name of the process-group back end; by default what suits `device`.
        device: "cpu" or "cuda:I", where this rank computes.
        timeout_s: seconds after which a collective that lacks a rank fails; elastic then ends the others.

    Raises ValueError outside a launcher, or for a time-out that is not positive; RanksLost, which names the ranks that are gone,
    where one did not come, or where an exchange in the block failed.
    """
    missing = [name for name in _RENDEZVOUS if name not in os.environ]
    if missing:
        raise ValueError(f"the environment lacks {', '.join(missing)}, which a launcher such as torchrun sets")
    if not timeout_s > 0:
        raise ValueError(f"timeout_s is {timeout_s}, expected a positive number of seconds")
    backend = backend or choose_backend(device)
    die_with_parent()
    torch.set_num_threads(1)
    if torch.device(device).type == "cuda":
        torch.cuda.set_device(device)
    ledger.install()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = _join(backend, rank, world_size, timeout_s)
    try:
        yield rank, world_size
        dist.barrier()  # a rank that leaves first would close connections that others still use
    except BaseException as error:
        _ask(lambda: answer(store, rank))
        if backend == "gloo":  # closing tells the others at once; NCCL may block here on what is still in flight
            dist.destroy_process_group()
        ordered = isinstance(error, SystemExit)  # the launcher's way to end the others when it has seen one die
        if ordered or (isinstance(error, RuntimeError) and not isinstance(error, LaunchError)):
            lost = _lost(store, rank, world_size, "the launcher ends this start" if ordered else str(error))
            if lost.lost:  # else the error is this rank's own, or follows from that of another, which says so itself
                raise lost from error
        raise
    dist.destroy_process_group()


def _join(backend: str, rank: int, world_size: int, timeout_s: float) -> Store:
    """Make the process group; the store that its ranks share."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    hosted = (
        os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    )  # by an agent: it is there before the ranks and after
    master, wait = rank == 0 and not hosted, timedelta(seconds=JOIN_S)
    try:
        server = TCPStore(address, port, is_master=master, timeout=wait, wait_for_workers=False)
        store = meet(server, rank, world_size, JOIN_S)
        timeout = timedelta(seconds=timeout_s)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    except NotMet as error:
        raise RanksLost(rank, error.lost, str(error)) from error
    except RuntimeError as error:
        raise RanksLost(rank, [], str(error)) from error
    return store


def _lost(store: Store, rank: int, world_size: int, cause: str) -> RanksLost:
    """Who does not answer; where the store is gone as well, rank 0, which hosts it or whose agent does."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it ends anyway: the launcher's order would come before the name
    lost = _ask(lambda: absent(store, rank, world_size, GRACE_S))
    if lost is None:
        return RanksLost(rank, [0], f"its node's store, which knows of the others, is gone too: {cause}")
    return RanksLost(rank, lost, cause)


def _ask(question: Callable[[], Answer]) -> Answer | None:
    """What the store's host says, None where it is gone. In a thread: of one that is silent, torch's store awaits some answers for ever."""
    found: list[Answer] = []

    def ask() -> None:
        with suppress(RuntimeError):
            found.append(question())

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(2 * GRACE_S)
    return found[0] if found else None
