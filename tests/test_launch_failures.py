"""Every other ending of a world is a named error: who raised, who died, who waits for whom; then it runs again."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from minigpt_dist.launch import DeadlineExceeded, LaunchError, RankDied, RankError, World, client, run_world
from minigpt_dist.launch import world as world_module
from minigpt_dist.launch.world import _Job


def total(value: float) -> float:
    tensor = torch.tensor([value * (dist.get_rank() + 1)], dtype=torch.float64)
    dist.all_reduce(tensor)
    return float(tensor)


def pid() -> int:
    return os.getpid()


def raise_on(rank: int, message: str) -> None:
    if dist.get_rank() == rank:
        raise ValueError(message)
    dist.barrier()


def raise_everywhere(message: str) -> None:
    raise KeyError(message)


class HostileError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def raise_hostile() -> None:
    raise HostileError


def system_exit() -> None:
    sys.exit(0)


def die_on(rank: int, how: str) -> None:
    if dist.get_rank() == rank:
        print("famous last words", flush=True)
        if how == "exit":
            os._exit(3)
        if how == "segfault":
            faulthandler._sigsegv()  # type: ignore[attr-defined]  # there for tests such as this
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(5))


def leave_the_group_and_stay() -> None:
    if dist.get_rank() == 1:
        dist.destroy_process_group()
        ctypes.CDLL(None).pause()
    dist.all_reduce(torch.ones(5))


def unsupported() -> object:
    return [{"loss": {1, 2}}]


def oversize() -> torch.Tensor:
    return torch.zeros(1, dtype=torch.uint8).expand(1 << 40)


def garbage() -> None:
    for fd in range(3, 64):  # whichever it is, the rank's socket is among them
        try:
            os.write(fd, b"this is no frame, but it is long enough to be taken for one")
        except OSError:
            continue


def stuck() -> None:
    """Ranks 0 and 2 reduce, rank 1 computes for ever, rank 3 sleeps in C and holds the interpreter's lock."""
    rank = dist.get_rank()
    if rank == 1:
        while True:
            pass
    if rank == 3:
        ctypes.PyDLL(None).pause()
    dist.all_reduce(torch.ones(7))


def stuck_in_pairs() -> None:
    """Rank 0 waits for the first of many asynchronous calls, rank 1 receives from rank 2, which has returned."""
    rank = dist.get_rank()
    if rank == 0:
        works = [dist.irecv(torch.ones(2), src=2, tag=tag) for tag in range(40)]
        works[0].wait()
    if rank == 1:
        dist.recv(torch.ones(2), src=2)


def line_of(text: str) -> int:
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.strip() == text)


def interrupt_once(job: object) -> None:
    raise KeyboardInterrupt


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World(4) as world:
        yield world


def test_an_exception_on_one_rank_is_named_and_the_others_are_shown_where_they_were(world: World) -> None:
    with pytest.raises(RankError) as caught:
        world.run(raise_on, 2, "no such layer")
    error = caught.value
    assert (error.rank, error.kind, error.message) == (2, "ValueError", "no such layer")
    assert str(error).startswith("rank 2 raised ValueError: no such layer\nTraceback (most recent call last):")
    assert error.traceback.rstrip().endswith("ValueError: no such layer")
    assert "raise ValueError(message)" in error.traceback


def test_an_exception_on_all_ranks_is_one_error(world: World) -> None:
    with pytest.raises(RankError) as caught:
        world.run(raise_everywhere, "m")
    assert (caught.value.rank in range(4), caught.value.kind, caught.value.message) == (True, "KeyError", "'m'")


def test_an_exception_without_a_text_is_still_named(world: World) -> None:
    with pytest.raises(RankError, match=r"raised HostileError: <its text raised RuntimeError>"):
        world.run(raise_hostile)


def test_leaving_with_status_zero_is_not_returning(world: World) -> None:
    with pytest.raises(RankError, match="raised SystemExit: 0"):
        world.run(system_exit)


@pytest.mark.parametrize("how, exitcode", [("exit", 3), ("kill", -9), ("segfault", -11)])
def test_a_death_is_told_from_the_losses_it_causes(world: World, how: str, exitcode: int) -> None:
    world.run(total, 1.0)
    with pytest.raises(RankDied) as caught:
        world.run(die_on, 1, how)
    assert (caught.value.rank, caught.value.exitcode) == (1, exitcode)
    assert "famous last words" in str(caught.value)


def test_a_lost_connection_without_a_death_is_reported_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world_module, "_CAUSE_S", 0.2)
    with pytest.raises(RankError, match=r"rank 0 raised RuntimeError: .*Connection (closed|reset) by peer"):
        run_world(leave_the_group_and_stay, 2)


def test_a_segmentation_fault_shows_its_python_stack(world: World) -> None:
    with pytest.raises(RankDied, match=r"Segmentation fault[\s\S]*in die_on"):
        world.run(die_on, 0, "segfault")


def test_a_failed_world_runs_again_on_fresh_ranks(world: World) -> None:
    before = world.run(pid)
    with pytest.raises(RankError):
        world.run(raise_on, 0, "x")
    assert not set(before) & set(world.run(pid))


def test_a_result_that_is_not_plain_is_refused_by_its_path(world: World) -> None:
    with pytest.raises(RankError, match=r"WireError: result\[0\]\['loss'\] is set, expected plain data"):
        world.run(unsupported)


def test_a_result_that_is_too_large_is_refused_before_it_is_made(world: World) -> None:
    with pytest.raises(RankError, match="WireError: result brings the result to 1099511627776 bytes, the limit is"):
        world.run(oversize)


def test_a_rank_that_writes_into_its_socket_is_caught() -> None:
    with pytest.raises(LaunchError, match="sent what is no message"):
        run_world(garbage, 1)


@pytest.fixture(scope="module")
def stuck_world() -> DeadlineExceeded:
    with World(4) as world:
        world.run(total, 1.0)  # so that the deadline is for the body alone
        with pytest.raises(DeadlineExceeded) as caught:
            world.run(stuck, deadline_s=2.0)
    return caught.value


def test_the_deadline_names_who_waits_in_which_call_and_line(stuck_world: DeadlineExceeded) -> None:
    site = f"{__file__}:{line_of('dist.all_reduce(torch.ones(7))')}"
    assert stuck_world.waiting == [(0, "all_reduce", site), (2, "all_reduce", site)]
    assert "deadline of 2 s passed: ranks 0, 2 wait in all_reduce at" in str(stuck_world)
    assert "(float32[7] on ranks [0, 1, 2, 3])" in str(stuck_world)


def test_the_deadline_names_who_never_came_and_where_they_are(stuck_world: DeadlineExceeded) -> None:
    assert stuck_world.absent == [1, 3]
    assert "rank 1 never came: it is in stuck at" in str(stuck_world)
    assert f":{line_of('ctypes.PyDLL(None).pause()')}" in str(stuck_world).splitlines()[0]


def test_the_deadline_shows_the_stack_of_every_rank(stuck_world: DeadlineExceeded) -> None:
    assert sorted(stuck_world.stacks) == [0, 1, 2, 3]
    assert all(" in stuck" in stack for stack in stuck_world.stacks.values())


def test_the_deadline_sees_waits_for_asynchronous_calls_and_single_partners() -> None:
    with World(3) as world:
        world.run(total, 1.0)
        with pytest.raises(DeadlineExceeded) as caught:
            world.run(stuck_in_pairs, deadline_s=2.0)
    calls = [
        (0, "irecv's wait", f"{__file__}:{line_of('works[0].wait()')}"),
        (1, "recv", f"{__file__}:{line_of('dist.recv(torch.ones(2), src=2)')}"),
    ]
    assert (caught.value.waiting, caught.value.absent) == (calls, [2])
    assert "peer 2" in str(caught.value)
    assert "rank 2 never came: it has returned its result" in str(caught.value)


def test_a_rank_server_that_dies_is_named_with_its_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_servers", {})
    monkeypatch.setattr(client, "_COMMAND", "raise SystemExit('no torch here')")
    with pytest.raises(LaunchError, match=r"the rank server has died; its last output:\nno torch here"):
        run_world(pid, 2)
    client._close_servers()


def test_a_run_is_ended_by_what_interrupts_the_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    with World(1) as world:
        [each] = world.run(pid)
        monkeypatch.setattr(_Job, "results", interrupt_once)
        with pytest.raises(KeyboardInterrupt):
            world.run(stuck)
    with pytest.raises(ProcessLookupError):
        os.kill(each, 0)
