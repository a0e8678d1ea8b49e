"""A job under torch elastic loses a rank or a node, goes on from its last good checkpoint, and ends in the bytes of an undisturbed run."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from minigpt_dist.__main__ import main
from minigpt_dist.checkpoint import load_resharded, save_sharded
from minigpt_dist.cli import train
from minigpt_dist.cli.commands import parser_of
from minigpt_dist.cli.restarts import JOURNAL, Start, earlier_starts, last_good, launched_job
from minigpt_dist.cli.settings import Settings, read_settings
from minigpt_dist.cli.usage import UsageError
from minigpt_dist.config import TrainConfig
from minigpt_dist.launch.meeting import NotMet, TCPStore, absent, meet
from minigpt_dist.launch.nodes import Node, open_stage, with_networks
from minigpt_dist.trace import state_digests

slow = pytest.mark.slow
STEPS = 60
WORDS = f"train --world-size 4 --steps {STEPS} --reduction exact --checkpoint-every 5 --checkpoint-step {STEPS} --device cpu".split()
PATIENCE_S = 250.0  # far above what anything here takes: a job that hangs ends the test, not the suite


def bytes_of(folder: Path) -> dict[str, str]:
    """Digests of model and optimizer in the last checkpoint, as a single rank would have them."""
    state = load_resharded(folder, 1)[0]
    return state_digests({"model": state["model"], "optimizer": state["optimizer"]})


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("runs") / "undisturbed"
    assert main([*WORDS, "--out", str(folder)]) == 0
    return bytes_of(folder)


def once(node: Node, ready: Callable[[], Any]) -> Any:
    """What `ready` returns as soon as that is true; an error if the node ends before."""
    deadline = time.monotonic() + PATIENCE_S
    while not (found := ready()):
        assert node.process.poll() is None, node.log.read_text()
        assert time.monotonic() < deadline
        time.sleep(
            0.005
        )  # between two looks at another process, until the deadline; nothing is said of how long it takes
    return found


def rank_in_step(node: Node, out: Path, rank: int, step: int = 12) -> int:
    """The process of `rank`, when rank 0 has recorded `step`."""

    def ready() -> int | None:
        metrics = out / "metrics-rank0.jsonl"
        return node.ranks().get(rank) if metrics.exists() and metrics.read_bytes().count(b"\n") > step else None

    return int(once(node, ready))


@contextmanager
def watched(pids: list[int]) -> Iterator[Callable[[], bool]]:
    """A question about these processes, which run now: do all of them end?"""
    with ExitStack() as stack:
        handles = [os.pidfd_open(pid) for pid in pids]
        for handle in handles:
            stack.callback(os.close, handle)
        yield lambda: all(select.select([handle], [], [], PATIENCE_S)[0] for handle in handles)


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGKILL, id="killed", marks=slow),
        pytest.param(signal.SIGSTOP, id="hanging", marks=pytest.mark.nightly),
    ],
)
def test_a_lost_rank_costs_a_restart_and_no_bit(
    number: signal.Signals, tmp_path: Path, undisturbed: dict[str, str]
) -> None:
    out = tmp_path / "run"
    with open_stage(tmp_path, "job") as stage:
        node = stage.start(["minigpt_dist", *WORDS, "--deadline", "15", "--out", str(out)], ranks=4, nodes=1)
        os.kill(rank_in_step(node, out, 2), number)
        assert node.process.wait(PATIENCE_S) == 0, node.log.read_text()
    said = node.log.read_text()
    assert "has lost rank 2: " in said
    assert "restarted once: world size 4 before, 4 now (1 micro-batches a rank); resumed from step " in said
    assert bytes_of(out) == undisturbed


@pytest.mark.parametrize(
    ("rank", "cut"),
    [
        pytest.param(3, [], id="killed-3", marks=slow),
        *(
            pytest.param(rank, cut, id=f"{'cut' if cut else 'killed'}-{rank}", marks=pytest.mark.nightly)
            for rank, cut in ((0, []), (3, ["--cut"]), (0, ["--cut"]))
        ),
    ],
)
def test_a_lost_node_costs_a_restart_at_half_the_ranks_and_no_bit(rank: int, cut: list[str], tmp_path: Path) -> None:
    if cut and with_networks(["true"]) is None:
        pytest.skip("this machine allows no network namespaces: see the loopback addresses' tests")
    words = ["incident", "--rank", str(rank), "--deadline", "20", *cut, "--out", str(tmp_path / "played")]
    played = subprocess.run(
        [sys.executable, "-m", "minigpt_dist", *words],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert played.returncode == 0, played.stdout + played.stderr
    assert "world size 4 before, 2 now (2 micro-batches a rank); resumed from step" in played.stdout
    assert f"step {STEPS}: all 61 entries of model and optimizer have the bytes of the undisturbed run" in played.stdout


@slow
def test_a_killed_agent_leaves_no_rank_behind(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with open_stage(tmp_path, "job") as stage:
        node = stage.start(["minigpt_dist", *WORDS, "--out", str(out)], ranks=2, nodes=1)
        rank_in_step(node, out, 1, step=1)
        with watched(list(node.ranks().values())) as all_end:
            os.kill(node.process.pid, signal.SIGKILL)
            assert all_end()


@pytest.mark.nightly
def test_the_same_command_again_goes_on_where_every_node_was_lost(tmp_path: Path, undisturbed: dict[str, str]) -> None:
    out, command = tmp_path / "run", ["minigpt_dist", *WORDS, "--out", str(tmp_path / "run")]
    with open_stage(tmp_path, "job") as stage:
        node = stage.start(command, ranks=4, nodes=1)
        rank_in_step(node, out, 0)
        node.kill()
        again = stage.start(command, ranks=1, nodes=1)
        assert again.process.wait(PATIENCE_S) == 0, again.log.read_text()
    assert "world size 4 before, 1 now (4 micro-batches a rank); resumed from step" in again.log.read_text()
    assert bytes_of(out) == undisturbed


def settings(line: str, ranks: int) -> Settings:
    args = parser_of(train).parse_args([*WORDS[1:], *line.split()])
    return read_settings(args, ranks)


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")


def journal(out: Path, job: str = "job", **changed: Any) -> None:
    """A folder in which a job has begun once, with the options of `WORDS`."""
    config = TrainConfig(world_size=4, steps=STEPS, reduction="exact", checkpoint_every=5, checkpoint_step=STEPS)
    out.mkdir()
    line = asdict(Start(job, 4, 0, None, {**config.to_dict(), **changed}))
    (out / JOURNAL).write_text(json.dumps(line) + '\n{"job": "jo')  # half a line, as a killed leader leaves it


@pytest.mark.usefixtures("named")
def test_a_job_that_comes_again_fits_its_first_batch_to_the_ranks_there_are(tmp_path: Path) -> None:
    journal(tmp_path / "run")
    found = settings(f"--out {tmp_path}/run", ranks=2)
    assert (found.config.world_size, found.config.micro_batches, len(found.earlier)) == (2, 2, 1)


@pytest.mark.usefixtures("named")
@pytest.mark.parametrize(
    ("job", "changed", "ranks", "said"),
    [
        ("job", {}, 3, "world_size is 3, but should be one of 1, 2, 4, which divide the 4 micro-batches of a step"),
        ("another", {}, 4, "which holds 'job.jsonl', but should be a new or empty folder"),
        ("job", {"lr": 0.5}, 4, "where job 'job' has begun with other options, but should be a folder of its own"),
    ],
)
def test_a_start_that_cannot_go_on_says_why_in_one_line(
    job: str, changed: dict[str, Any], ranks: int, said: str, tmp_path: Path
) -> None:
    journal(tmp_path / "run", job, **changed)
    with pytest.raises(UsageError, match=said):
        settings(f"--out {tmp_path}/run", ranks)


def test_a_job_that_may_come_again_must_have_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert launched_job() is None
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    with pytest.raises(UsageError, match="the launcher's job has no name, but should have one"):
        launched_job()


@pytest.mark.usefixtures("named")
def test_a_broken_journal_is_told(tmp_path: Path) -> None:
    (tmp_path / JOURNAL).write_text("nothing\n")
    with pytest.raises(UsageError, match="holds a line that is no start of a job"):
        earlier_starts(tmp_path)


def test_a_damaged_checkpoint_is_passed_over_for_the_newest_good_one(tmp_path: Path) -> None:
    for step in (5, 10, 15):
        save_sharded([{"step": step}], tmp_path, step)
    shard = next((tmp_path / "step-00000010").glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"\x7f")
    folder, step, damaged = last_good(tmp_path, steps=15)
    assert (folder, step, len(damaged)) == (tmp_path / "step-00000005", 5, 1)
    assert str(shard) in damaged[0]


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def each(store: TCPStore, ranks: list[int], body: Callable[[TCPStore, int], object]) -> None:
    """`body` on a thread a rank, each with a connection of its own."""
    clients = {rank: TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False) for rank in ranks}
    threads = [threading.Thread(target=body, args=(clients[rank], rank)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_each_start_meets_afresh_in_a_store_that_remembers_the_one_before(store: TCPStore) -> None:
    places: list[dict[int, str]] = [{}, {}]
    for start in range(2):  # of the first one, rank 1's name and all answers stay in the store

        def body(client: TCPStore, rank: int, start: int = start) -> None:
            mine = meet(client, rank, 3, timeout_s=30)
            mine.set(f"seen-{rank}", str(start))
            places[start][rank] = ",".join(mine.get(f"seen-{other}").decode() for other in range(3))

        each(store, [0, 1, 2], body)
    assert places == [dict.fromkeys(range(3), "0,0,0"), dict.fromkeys(range(3), "1,1,1")]


def test_an_answer_that_the_start_before_has_left_is_not_taken(store: TCPStore) -> None:
    each(store, [0, 1], lambda client, rank: meet(client, rank, 2, timeout_s=30))
    with pytest.raises(NotMet) as caught:
        meet(store, 1, 2, timeout_s=0.2)  # no rank 0 is there now
    assert caught.value.lost == [0]


def test_who_does_not_come_is_named(store: TCPStore) -> None:
    with pytest.raises(NotMet) as caught:
        meet(store, 0, 3, timeout_s=0.05)
    assert caught.value.lost == [1, 2]


def test_who_does_not_answer_after_a_loss_is_named(store: TCPStore) -> None:
    found: dict[int, list[int]] = {}
    each(store, [0, 2, 3], lambda client, rank: found.update({rank: absent(client, rank, 5, grace_s=0.5)}))
    assert found == {0: [1, 4], 2: [1, 4], 3: [1, 4]}
