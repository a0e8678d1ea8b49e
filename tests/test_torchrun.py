"""The same commands as ranks of torch elastic: same report, same bits, one voice."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from minigpt_dist.__main__ import main
from minigpt_dist.cli.job import LaunchedRanks
from minigpt_dist.cli.judging import LaunchedSubject
from minigpt_dist.cli.usage import UsageError
from minigpt_dist.launch import RankError, run_world
from minigpt_dist.parallel.collectives import world
from minigpt_dist.trace import read_trace
from minigpt_dist.verify.checks import CHECKS, put

pytestmark = pytest.mark.slow

SIZE = ["--steps", "4", "--checkpoint-step", "2"]


def torchrun(*words: str, ranks: int = 2) -> subprocess.CompletedProcess[str]:
    """`torchrun -m minigpt_dist WORDS`. Standalone: its rendezvous takes a free port."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return subprocess.run(
        [*launcher, "-m", "minigpt_dist", *words], capture_output=True, text=True, timeout=120, check=False
    )


def test_a_run_under_torchrun_is_bit_equal_to_one_on_our_own_ranks(tmp_path: Path) -> None:
    done = torchrun("train", *SIZE, "--out", str(tmp_path / "elastic"))
    assert (done.returncode, done.stdout.count("composition verified: 2 ranks, 4 steps; ")) == (0, 1), done.stderr
    assert main(["--world-size", "2", *SIZE, "--out", str(tmp_path / "own")]) == 0
    traces = [read_trace(tmp_path / name / "trace.jsonl").records for name in ("elastic", "own")]
    elastic, own = ([(r.step, r.rank, r.params, r.optimizer) for r in records] for records in traces)
    assert elastic == own


def in_job() -> LaunchedRanks:
    """This rank's place in a launcher's job; the process group is the world's."""
    world_size, rank = world()
    return LaunchedRanks(world_size, rank, "cpu", "gloo")


def judge_in_job(names: list[str]) -> list[tuple[str, bool]]:
    job = in_job()
    subject = LaunchedSubject("minigpt_dist", (), 60.0, job=job)
    return [(name, put(CHECKS[name], subject, job.world_size).passed) for name in names]


def test_every_rank_of_a_job_comes_to_the_same_verdicts() -> None:
    names = ["param_norms", "resume_bytes"]
    assert run_world(judge_in_job, 2, names) == [[(name, True) for name in names]] * 2


def fail_on_rank_1(word: str) -> str:
    if world()[1] == 1:
        raise KeyError(word)
    return word


def failure_in_job() -> tuple[int, str]:
    with pytest.raises(RankError) as caught:
        in_job().run(fail_on_rank_1, f"from rank {world()[1]}")
    return caught.value.rank, caught.value.message


def test_what_one_rank_raises_all_raise_and_arguments_are_the_leaders() -> None:
    assert run_world(failure_in_job, 2) == [(1, "'from rank 0'")] * 2


def refuse() -> str:
    raise UsageError(f"asked on rank {world()[1]}")


def refusal_in_job() -> tuple[str, str]:
    job = in_job()
    with pytest.raises(UsageError) as caught:
        job.agreed(refuse)
    return str(caught.value), job.agreed(lambda: f"made on rank {job.rank}")


def test_what_the_leader_finds_holds_for_all() -> None:
    assert run_world(refusal_in_job, 2) == [("asked on rank 0", "made on rank 0")] * 2
