"""Whatever becomes of a parent, its ranks and its servers end with it; parents do not meet."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from minigpt_dist.launch import RankDied, World, client, rank, run_world

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc and waits on their pidfds"),
]

MARK = "MINIGPT_DIST_TEST_MARK"
_worlds: list[World] = []  # in a rank that plays a parent: kept from one of its jobs to the next


def total(value: float) -> float:
    tensor = torch.full((1,), value)
    dist.all_reduce(tensor)
    return float(tensor)


def as_parent() -> list[float]:
    """Be a parent of ranks, from inside a rank."""
    _worlds.append(World(2))
    return _worlds[-1].run(total, 1.0)


def as_parent_that_forks() -> tuple[int, list[float]]:
    """Fork while holding a world.  The child must hold nothing of it, and the parent all."""
    child = os.fork()
    if child == 0:
        os._exit(len(client._servers) + (_worlds[-1]._crew is not None and _worlds[-1]._crew.usable))
    return os.waitpid(child, 0)[1], _worlds[-1].run(total, 2.0)


def as_parent_that_is_killed() -> None:
    run_world(kill_the_parent_and_stay, 2, os.getpid())


def kill_the_parent_and_stay(parent: int) -> None:
    dist.barrier()  # both are there, and both are stuck for good
    if dist.get_rank() == 0:
        os.kill(parent, signal.SIGKILL)
    dist.recv(torch.ones(1), src=1 - dist.get_rank())


def cut_the_lifeline() -> None:
    """Do to this rank what the end of its server does where the kernel ties no process to its parent."""
    reading, writing = os.pipe()
    thread = threading.Thread(target=rank._die_with, args=(reading,))
    thread.start()
    os.close(writing)
    thread.join()


def marked(mark: str) -> list[int]:
    """Pids of all processes that were started with the mark in their environment."""
    needle, found = f"{MARK}={mark}".encode(), []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and needle in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:  # gone, or another user's
            continue
    return found


def wait_for_the_end(pids: list[int]) -> list[int]:
    """Wait until each has ended; return those that have not after a minute."""
    left = []
    for pid in pids:
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        if not select.select([fd], [], [], 60.0)[0]:
            left.append(pid)
        os.close(fd)
    return left


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[World, str, Path]]:
    """A rank that plays a parent, the mark that all it starts inherits, and its folder for temporary files."""
    mark, folder = uuid.uuid4().hex, tmp_path_factory.mktemp("temporary")
    with World(1, env={MARK: mark, "TMPDIR": str(folder)}, deadline_s=120.0) as world:
        yield world, mark, folder


def test_two_parents_run_their_worlds_at_once(parent: tuple[World, str, Path]) -> None:
    with ThreadPoolExecutor() as pool:
        theirs = pool.submit(parent[0].run, as_parent)
        ours = [pool.submit(run_world, total, 2, value) for value in (3.0, 4.0)]
        assert [world.result() for world in ours] == [[6.0, 6.0], [8.0, 8.0]]
        assert theirs.result() == [[2.0, 2.0]]


def test_a_parent_that_forks_keeps_its_world_and_its_child_gets_none(parent: tuple[World, str, Path]) -> None:
    assert parent[0].run(as_parent_that_forks) == [(0, [4.0, 4.0])]


def test_nothing_outlives_a_killed_parent(parent: tuple[World, str, Path]) -> None:
    world, mark, folder = parent
    assert len(marked(mark)) == 3  # its server and two ranks
    with pytest.raises(RankDied) as caught:
        world.run(as_parent_that_is_killed)
    assert caught.value.exitcode == -signal.SIGKILL
    assert wait_for_the_end(marked(mark)) == []
    assert marked(mark) == []
    assert list(folder.iterdir()) == []


def test_a_rank_ends_when_its_lifeline_does() -> None:
    with pytest.raises(RankDied, match="killed by SIGKILL"):
        run_world(cut_the_lifeline, 1)
