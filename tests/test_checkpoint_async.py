"""Saving behind training's back: what was saved is what was there, and a failure is heard."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_cases import canonical, on_ranks, world_states

from minigpt_dist.checkpoint import AsyncSaver, CheckpointError, load_sharded, save_shard, save_sharded


def test_training_may_change_tensors_at_once(tmp_path: Path) -> None:
    go, tensor, log = threading.Event(), torch.ones(3), [1]

    def write(copy: Any, step: int) -> Any:
        assert go.wait(10)
        return save_sharded([copy], tmp_path, step)

    with AsyncSaver(write) as saver:
        saver.save({"w": tensor, "log": log}, 1)
        tensor.zero_()
        log.append(2)
        go.set()
    assert canonical(load_sharded(tmp_path, 1)) == canonical([{"w": torch.ones(3), "log": [1]}])


def test_there_are_never_two_saves_at_once(tmp_path: Path) -> None:
    running, most = [0], [0]

    def write(copy: Any, step: int) -> int:
        running[0] += 1
        most[0] = max(most[0], running[0])
        save_sharded([copy], tmp_path, step)
        running[0] -= 1
        return step

    with AsyncSaver(write) as saver:
        for step in range(6):
            saver.save({"step": step}, step)
        assert saver.wait() == 5
    assert most == [1]


def fail(copy: Any, step: int) -> None:
    raise OSError("no space")


def test_a_failure_is_raised_by_the_next_save_once_and_the_saver_goes_on() -> None:
    saver = AsyncSaver(fail)
    saver.save({}, 7)
    with pytest.raises(CheckpointError, match="the save of step 7 failed: no space"):
        saver.save({}, 8)
    saver.close()


@pytest.mark.parametrize("how", ["wait", "close", "__exit__"])
def test_a_failure_is_raised_by_whatever_comes_next(how: str) -> None:
    saver = AsyncSaver(fail)
    saver.save({}, 7)
    with pytest.raises(CheckpointError, match="the save of step 7 failed: no space"):
        getattr(saver, how)(*[None] * (3 if how == "__exit__" else 0))
    saver.close()


def test_a_state_that_cannot_be_saved_is_refused_at_once_and_nothing_is_started() -> None:
    with AsyncSaver(fail) as saver, pytest.raises(ValueError, match="state/x: cannot be saved"):
        saver.save({"x": object()}, 1)


def test_a_closed_saver_takes_nothing() -> None:
    saver = AsyncSaver(fail)
    saver.close()
    with pytest.raises(ValueError, match="closed"):
        saver.save({}, 1)


def test_ranks_save_together_in_their_threads(tmp_path: Path) -> None:
    def body(rank: int, exchange: Any) -> None:
        together = {"rank": rank, "world_size": 3, "exchange": exchange}
        with AsyncSaver(lambda state, step: save_shard(state, tmp_path, step, **together)) as saver:
            saver.save(world_states(3)[rank], 10)

    assert on_ranks(3, body) == [None] * 3
    assert canonical(load_sharded(tmp_path, 3)) == canonical(world_states(3))


FORGETFUL = """
from minigpt_dist.checkpoint.async_saver import AsyncSaver
def fail(state, step): raise OSError("no space")
AsyncSaver(fail).save({}, 7)
"""


@pytest.mark.slow
def test_a_failure_that_nobody_asked_for_is_reported_at_exit() -> None:
    path = str(Path(__file__).parent.parent)
    done = subprocess.run([sys.executable, "-c", FORGETFUL], capture_output=True, text=True, cwd=path, timeout=60)
    assert "CheckpointError: the save of step 7 failed: no space" in done.stderr
