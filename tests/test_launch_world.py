"""A world runs a body on every rank, in the parent's surroundings, and returns what each returned, in order."""

from __future__ import annotations

import math
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from minigpt_dist.launch import LaunchError, RankDied, World, run_world
from minigpt_dist.launch.client import Method


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


def leave_without_a_word(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(3)
    dist.barrier()


def leave_a_child() -> int:
    return subprocess.Popen(["sleep", "3600"]).pid


def threads_of_the_server() -> list[str]:
    return os.listdir(f"/proc/{os.getppid()}/task")


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
        run_world(leave_without_a_word, 2, 0)
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


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_ranks_are_forked_from_a_process_of_one_thread(world: World) -> None:
    assert {len(threads) for threads in world.run(threads_of_the_server)} == {1}


@pytest.mark.slow
def test_spawned_ranks_do_the_same() -> None:
    with World(2, method="spawn", env={"GIVEN": "too"}) as world:
        assert world.run(total, 1.0) == [3.0, 3.0]
        assert [(seen["threads"], seen["env"]["GIVEN"]) for seen in world.run(surroundings)] == [(1, "too")] * 2
        with pytest.raises(RankDied) as caught:
            world.run(leave_without_a_word, 1)
        assert (caught.value.rank, caught.value.exitcode) == (1, 3)


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
