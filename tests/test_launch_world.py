"""A world runs a body on every rank, returns what each returned, and turns every other ending into a named error."""

from __future__ import annotations

import ctypes
import faulthandler
import math
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from minigpt_dist.launch import DeadlineExceeded, LaunchError, RankDied, RankError, World, client, run_world
from minigpt_dist.launch.client import Method
from minigpt_dist.launch.world import _Job


def place(*args: object) -> tuple[int, int, tuple[object, ...]]:
    return dist.get_rank(), dist.get_world_size(), args


def total(value: float) -> float:
    tensor = torch.tensor([value * (dist.get_rank() + 1)], dtype=torch.float64)
    dist.all_reduce(tensor)
    return float(tensor)


def echo(value: Any) -> Any:
    return value


def own_tensors() -> dict[str, torch.Tensor]:
    rank = dist.get_rank()
    return {
        "bf16": torch.full((3,), rank + 0.1).bfloat16(),
        "nan": torch.tensor([math.nan, -0.0]),
        "none": torch.ones(0, 2),
    }


def surroundings() -> dict[str, Any]:
    return {
        "pid": os.getpid(),
        "session": os.getsid(0),
        "threads": torch.get_num_threads(),
        "stdin": os.path.samestat(os.fstat(0), os.stat(os.devnull)),
        "cwd": os.getcwd(),
        "path": sys.path,
        "env": dict(os.environ),
    }


def pid() -> int:
    return os.getpid()


def say(text: str) -> None:
    print(text)


def leave_a_child() -> int:
    return subprocess.Popen(["sleep", "3600"]).pid


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


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World(4) as world:
        yield world


def test_results_come_in_rank_order_with_their_arguments(world: World) -> None:
    assert world.run(place, "a", {"b": 1}) == [(rank, 4, ("a", {"b": 1})) for rank in range(4)]


def test_ranks_are_members_of_one_group(world: World) -> None:
    assert world.run(total, 0.5) == [5.0] * 4


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_every_world_size_runs(world_size: int) -> None:
    assert run_world(total, world_size, 1.0) == [world_size * (world_size + 1) / 2] * world_size


def test_tensors_come_back_bit_for_bit(world: World) -> None:
    for rank, result in enumerate(world.run(own_tensors)):
        assert torch.equal(result["bf16"], torch.full((3,), rank + 0.1).bfloat16())
        assert result["nan"].view(torch.int32).tolist() == torch.tensor([math.nan, -0.0]).view(torch.int32).tolist()
        assert result["none"].shape == (0, 2)


def test_large_arguments_and_results_cross(world: World) -> None:
    tensor = torch.arange(1 << 20)
    assert all(torch.equal(result, tensor) for result in world.run(echo, tensor))


def test_the_ranks_of_a_world_stay_for_the_next_run(world: World) -> None:
    assert world.run(pid) == world.run(pid)


def test_the_ranks_of_two_runs_differ() -> None:
    assert not set(run_world(pid, 1)) & set(run_world(pid, 1))


def test_a_rank_is_one_thread_in_its_own_session_in_the_parents_surroundings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SET_LATE", "yes")
    monkeypatch.setenv("RANK", "7")
    monkeypatch.syspath_prepend(str(tmp_path / "late"))
    [seen] = run_world(surroundings, 1, env={"GIVEN": "too"})
    assert seen["session"] == seen["pid"] != os.getpid()
    assert (seen["threads"], seen["stdin"], seen["cwd"], seen["path"]) == (1, True, str(tmp_path), sys.path)
    assert {"SET_LATE": "yes", "GIVEN": "too", "OMP_NUM_THREADS": "1"}.items() <= seen["env"].items()
    assert "RANK" not in seen["env"]


def test_output_stays_in_the_given_folder(tmp_path: Path) -> None:
    run_world(say, 2, "hello from a rank", folder=tmp_path / "run")
    assert [(tmp_path / "run" / f"rank{rank}.log").read_text() for rank in range(2)] == ["hello from a rank\n"] * 2


def test_nothing_is_left_on_disk_otherwise(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    run_world(total, 2, 1.0)
    with pytest.raises(RankDied):
        run_world(die_on, 2, 0, "exit")
    assert list(tmp_path.iterdir()) == []


def test_closed_worlds_leave_no_process_not_even_an_unreaped_one() -> None:
    with World(2) as world:
        pids = world.run(pid)
    for each in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(each, 0)


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="waits on a process that is no child, as Linux can")
def test_what_a_rank_has_started_ends_with_it() -> None:
    with World(1) as world:
        fd = os.pidfd_open(world.run(leave_a_child)[0])
    assert select.select([fd], [], [], 30.0)[0] == [fd]
    os.close(fd)


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


def test_a_rank_that_writes_into_its_socket_is_caught(world: World) -> None:
    with pytest.raises(LaunchError, match="sent what is no message"):
        world.run(garbage)


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


def test_spawned_ranks_do_the_same() -> None:
    with World(2, method="spawn", env={"GIVEN": "too"}) as world:
        assert world.run(total, 1.0) == [3.0, 3.0]
        assert [(seen["threads"], seen["env"]["GIVEN"]) for seen in world.run(surroundings)] == [(1, "too")] * 2
        with pytest.raises(RankDied) as caught:
            world.run(die_on, 1, "exit")
        assert (caught.value.rank, caught.value.exitcode) == (1, 3)


def test_a_rank_server_that_dies_is_named_with_its_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_servers", {})
    monkeypatch.setattr(client, "_COMMAND", "raise SystemExit('no torch here')")
    with pytest.raises(LaunchError, match=r"the rank server has died; its last output:\nno torch here"):
        run_world(pid, 2)
    client._close_servers()


def interrupt_once(job: object) -> None:
    raise KeyboardInterrupt


def test_a_run_is_ended_by_what_interrupts_the_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    with World(1) as world:
        [each] = world.run(pid)
        monkeypatch.setattr(_Job, "results", interrupt_once)
        with pytest.raises(KeyboardInterrupt):
            world.run(stuck)
    with pytest.raises(ProcessLookupError):
        os.kill(each, 0)


@pytest.mark.parametrize("world_size", [0, -1, 2.0, True, None])
def test_a_world_size_that_is_no_positive_int_is_refused(world_size: Any) -> None:
    with pytest.raises(ValueError, match=r"world_size is .* expected an int of at least 1"):
        World(world_size)


@pytest.mark.parametrize("deadline_s", [0, -1.0, math.inf, math.nan, "1"])
def test_a_deadline_that_is_no_positive_number_is_refused(deadline_s: Any, world: World) -> None:
    with pytest.raises(ValueError, match=r"deadline_s is .* expected a positive, finite number"):
        World(1, deadline_s=deadline_s)
    with pytest.raises(ValueError, match="deadline_s is"):
        world.run(pid, deadline_s=deadline_s)


@pytest.mark.parametrize("body", [lambda: 1, "name", World(1).run], ids=["lambda", "string", "method"])
def test_a_body_that_no_other_process_can_look_up_is_refused(body: Any, world: World) -> None:
    with pytest.raises(ValueError, match=r"body is .* expected"):
        world.run(body)


def test_arguments_that_cannot_be_sent_are_refused(world: World) -> None:
    with pytest.raises(ValueError, match="args cannot be sent to the ranks"):
        world.run(echo, lambda: 1)


@pytest.mark.parametrize("options", [{"method": "threads"}, {"env": {"A": 1}}, {"folder": __file__}])
def test_other_bad_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"expected|not a directory"):
        World(1, **options)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_windows_is_refused_clearly(monkeypatch: pytest.MonkeyPatch, method: Method) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(LaunchError, match="not Windows"):
        World(1, method=method)


def test_forking_is_refused_where_it_is_not_safe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ValueError, match="not safe on darwin"):
        World(1, method="fork")
