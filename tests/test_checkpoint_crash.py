"""Whatever happens during a save, the old checkpoint or the new one loads, whole."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_faults import CASES, found, leftovers, states

from minigpt_dist.checkpoint import CheckpointError, load_sharded, save_sharded

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
DYING = [f"{scenario}: {mode}" for scenario, modes in CASES.items() for mode in modes if not mode.startswith("E")]
FAILING = [f"{scenario}: {mode}" for scenario, modes in CASES.items() for mode in modes if mode.startswith("E")]
REMOVING = {"open", "scandir", "unlink", "rmdir"}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What came of every scenario at every call, played by a process of its own."""
    command = [sys.executable, str(HERE / "checkpoint_faults.py"), str(tmp_path_factory.mktemp("faults"))]
    path = os.pathsep.join([str(HERE.parent), *sys.path])
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0, done.stderr
    result: dict[str, list[dict[str, Any]]] = json.loads(done.stdout)
    return result


@pytest.mark.parametrize("case", DYING)
def test_a_save_that_dies_at_any_call_leaves_the_old_or_the_new(case: str, outcomes: Any) -> None:
    old = "none" if case.startswith("first") else "old"
    seen = [row["found"] for row in outcomes[case]]
    assert seen == sorted(seen, key=["none", "old", "new"].index)  # once new, never old again
    assert set(seen) == {old, "new"}


@pytest.mark.parametrize("case", FAILING)
def test_a_disk_error_at_any_call_is_raised_and_costs_nothing(case: str, outcomes: Any) -> None:
    old = "none" if case.startswith("first") else "old"
    assert {row["found"] for row in outcomes[case]} == {old, "new"}
    quiet = [row for row in outcomes[case] if not row["raised"].startswith("CheckpointError")]
    # Sweeping what another save left is the one thing that may fail in silence: it must not cost this save.
    assert all(row["found"] == "new" and row["leftovers"] == [".tmp-0000"] for row in quiet)
    assert not quiet or case.startswith("with leftovers")


@pytest.mark.parametrize("case", FAILING)
def test_after_a_disk_error_no_temporary_folder_is_left_unless_removing_it_was_what_failed(
    case: str, outcomes: Any
) -> None:
    left = [row for row in outcomes[case] if [name for name in row["leftovers"] if name != ".tmp-0000"]]
    assert all(row["call"] in REMOVING and row["found"] == "new" for row in left)


@pytest.mark.parametrize("case", ["with leftovers: killed", "with leftovers: EIO"])
def test_the_next_save_works_and_sweeps(case: str, outcomes: Any) -> None:
    assert all(row["later"] == ["next"] for row in outcomes[case])


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_killed_at_any_call_of_a_parallel_save_leaves_the_old_or_the_new(rank: int, outcomes: Any) -> None:
    *hit, unhit = outcomes[f"rank {rank}: killed"]
    assert unhit["said"] == ["saved", "saved"]
    assert all(row["found"] in ("old", "new") and row["said"][rank] is None for row in hit)
    assert all("Error" in row["said"][1 - rank] for row in hit)  # nobody believes in a save that a peer did not finish


@pytest.mark.parametrize("rank", [0, 1])
def test_a_disk_error_on_one_rank_raises_the_same_on_all(rank: int, outcomes: Any) -> None:
    *hit, unhit = outcomes[f"rank {rank}: EIO"]
    assert unhit["said"] == ["saved", "saved"]
    assert all(row["said"][0] == row["said"][1] and f"rank {rank} failed first" in row["said"][0] for row in hit)
    assert all(row["found"] == "old" and not row["leftovers"] for row in hit if "committing" not in row["said"][0])


def test_a_file_size_limit_is_an_error_and_costs_nothing(tmp_path: Path) -> None:
    save_sharded(states(1.0), tmp_path, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        with pytest.raises(CheckpointError, match=r"rank-00000.*: expected to write .* File too large"):
            save_sharded([{"model": {"w": torch.zeros(1 << 20)}}] * 2, tmp_path, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (found(tmp_path), leftovers(tmp_path)) == ("old", [])


def test_a_folder_that_may_not_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file: expected to make a temporary folder in it, found"):
        save_sharded(states(1.0), tmp_path / "file", 1)


def test_two_savers_of_one_step_at_once_do_not_lose_it(tmp_path: Path) -> None:
    threads = [threading.Thread(target=save_sharded, args=(states(v), tmp_path, 1)) for v in (1.0, 2.0) for _ in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found(tmp_path) in ("old", "new")
    assert not leftovers(tmp_path)
    assert load_sharded(tmp_path, 2)
