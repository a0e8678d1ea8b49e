"""Offloaded optimizer state: the same bits, a chunk in memory at a time, and nothing left of it when a process ends."""

from __future__ import annotations

import os
import resource
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from minigpt_dist.config import TrainConfig
from minigpt_dist.launch import LaunchError, RankError, run_world
from minigpt_dist.loss import next_token_loss
from minigpt_dist.model import MiniGPT
from minigpt_dist.parallel import offload
from minigpt_dist.parallel.collectives import world
from minigpt_dist.parallel.offload import Offload, OffloadedState, ResidentState
from minigpt_dist.parallel.zero import ZeroOptimizer
from minigpt_dist.trace import state_digests
from minigpt_dist.worker import rank_body, resized

OPTIONS = {"lr": 0.05, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
NAMES = ("master", "exp_avg", "exp_avg_sq")


def states(
    numel: int, where: str, folder: Path, chunk: int, dtype: torch.dtype = torch.float32
) -> tuple[ResidentState, OffloadedState]:
    """Two states with equal masters."""
    master = torch.randn(numel, dtype=dtype, generator=torch.Generator().manual_seed(0))
    return ResidentState(master.clone()), OffloadedState(master, Offload(where, folder, chunk))


@pytest.mark.parametrize("where", ["memory", "disk"])
@pytest.mark.parametrize("numel, chunk", [(1, 1), (10, 3), (5000, 1024), (5000, 10_000)])
def test_any_chunk_gives_the_bits_of_the_whole(where: str, numel: int, chunk: int, tmp_path: Path) -> None:
    resident, offloaded = states(numel, where, tmp_path, chunk)
    for step in (1, 2, 3):
        grad = torch.randn(numel, generator=torch.Generator().manual_seed(step))
        for state in (resident, offloaded):
            state.adamw_(0, numel, grad, step, **OPTIONS)
            state.adamw_(numel // 3, numel, grad[numel // 3 :], step, **OPTIONS)
    assert all(torch.equal(offloaded.copy(name, numel), resident.copy(name, numel)) for name in NAMES)


def test_float64_state_keeps_its_type(tmp_path: Path) -> None:
    resident, offloaded = states(77, "disk", tmp_path, 10, torch.float64)
    for state in (resident, offloaded):
        state.adamw_(0, 77, torch.ones(77, dtype=torch.float64), 1, **OPTIONS)
    assert torch.equal(offloaded.copy("exp_avg_sq", 77), resident.copy("exp_avg_sq", 77))


def test_a_shard_without_elements_can_be_offloaded(tmp_path: Path) -> None:
    assert OffloadedState(torch.empty(0), Offload("disk", tmp_path)).copy("master", 0).numel() == 0


def test_the_next_chunk_is_read_and_the_last_one_written_while_one_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, state = states(30, "disk", tmp_path, 10)
    read, written = [threading.Event() for _ in range(3)], [threading.Event() for _ in range(3)]
    computed: list[int] = []

    def tell(original: Any, events: list[threading.Event]) -> Any:
        def call(lo: int, hi: int, chunk: list[Tensor]) -> list[Tensor]:
            done: list[Tensor] = original(lo, hi, chunk)
            events[lo // 10].set()
            return done

        return call

    def compute(*args: Any, **options: Any) -> None:
        k = len(computed)
        computed.append(k)
        assert k == 2 or read[k + 1].wait(20)  # while chunk k is being computed
        assert k == 0 or written[k - 1].wait(20)

    monkeypatch.setattr(state, "_read", tell(state._read, read))
    monkeypatch.setattr(state, "_write", tell(state._write, written))
    monkeypatch.setattr(offload, "adamw_", compute)
    state.adamw_(0, 30, torch.zeros(30), 1, **OPTIONS)
    assert computed == [0, 1, 2]


def test_a_chunk_that_cannot_be_read_is_an_error_and_leaves_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, state = states(30, "disk", tmp_path, 10)
    monkeypatch.setattr(state, "_read", lambda lo, hi, chunk: 1 // (lo - 10))
    before = threading.active_count()
    with pytest.raises((ZeroDivisionError, TypeError)):
        state.adamw_(0, 30, torch.zeros(30), 1, **OPTIONS)
    assert threading.active_count() == before


def growth_body(folder: str, where: str, numel: int, chunk: int) -> tuple[int, int]:
    """Bytes by which the state and two steps raise the resident memory at the most; and those of the state."""
    master, grad = torch.ones(numel), torch.ones(numel)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = _status("VmRSS")
    state = OffloadedState(master, Offload(where, Path(folder), chunk))
    for step in (1, 2):
        state.adamw_(0, numel, grad, step, **OPTIONS)
    return _status("VmHWM") - before, 3 * state.master.nbytes


def _status(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak of a step is read from Linux's /proc")
def test_a_step_on_disk_is_resident_a_few_chunks_at_a_time(tmp_path: Path) -> None:
    numel, chunk = 2**23, 2**17
    ((grown, whole),) = run_world(growth_body, 1, str(tmp_path), "disk", numel, chunk)
    ((grown_in_memory, _),) = run_world(growth_body, 1, str(tmp_path), "memory", numel, chunk)
    assert grown <= 16 * 4 * chunk + 8 * 2**20 < whole / 4 == 24 * 2**20
    assert grown_in_memory >= whole  # the measure sees what is resident


def step_body(folder: str | None, stage: int, max_norm: float | None) -> list[dict[str, str]]:
    """Digests of parameters and optimizer after each of some steps, weights loaded and options edited on the way."""
    torch.manual_seed(0)
    model = MiniGPT(dropout=0.0)
    away = None if folder is None else Offload("disk", Path(folder), 1000)
    options = {"lr": 0.01, "weight_decay": 0.1, "max_norm": max_norm}
    groups = [{"params": list(model.blocks.parameters())}, {"params": list(model.head.parameters()), "lr": 0.02}]
    optimizer = ZeroOptimizer(groups, *world(), stage=stage, model=model, offload=away, **options)
    optimizer.add_param_group({"params": list(model.tok_embed.parameters())})
    seen = []
    for step in range(3):
        x = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(10 * step + world()[1]))
        optimizer.zero_grad()
        next_token_loss(model(x), x).backward()
        optimizer.step()
        with optimizer.gathered():
            if step == 1:
                model.load_state_dict({name: 0.5 * t for name, t in model.state_dict().items()})
            seen.append({**state_digests(model.state_dict()), **state_digests(optimizer.state_dict())})
        optimizer.load_state_dict(optimizer.state_dict())
    return seen


@pytest.mark.parametrize(
    "stage, max_norm",
    [
        (1, None),
        pytest.param(1, 0.1, marks=pytest.mark.slow),
        *(pytest.param(s, 0.1, marks=pytest.mark.slow) for s in (2, 3)),
    ],
)
def test_a_sharded_optimizer_has_the_bits_of_the_resident_one(
    stage: int, max_norm: float | None, tmp_path: Path
) -> None:
    there = run_world(step_body, 2, str(tmp_path), stage, max_norm)
    assert there == run_world(step_body, 2, None, stage, max_norm)
    assert list(tmp_path.iterdir()) == []


def full_disk_body(folder: str) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, 2**16))
    ZeroOptimizer(nn.Linear(100, 100), *world(), offload=Offload("disk", Path(folder)))


def test_a_full_disk_is_an_error_when_the_state_is_made(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="File too large"):
        run_world(full_disk_body, 1, str(tmp_path))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("tape", None), "offload is 'tape', but should be one of memory, disk"),
        (("disk", None), "folder is None, but should be a folder for the file"),
        (("memory", None, 0), "chunk is 0, but should be a whole number of at least 1"),
    ],
)
def test_another_place_is_refused(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Offload(*arguments)


RUN = TrainConfig(world_size=2, steps=6, checkpoint_step=2, batch=2, offload="disk")


def killed_body(config: dict[str, Any], folder: str) -> None:
    """A run whose rank 1 is killed in the middle of the update of step 4, with a chunk half written."""
    original, updates = OffloadedState._write, []

    def write(self: OffloadedState, lo: int, hi: int, chunk: list[Tensor]) -> list[Tensor]:
        updates.append(lo)
        if world()[1] == 1 and len(updates) == 4:
            self.master[lo : (lo + hi) // 2].copy_(chunk[0][: (lo + hi) // 2 - lo])
            os.kill(os.getpid(), signal.SIGKILL)
        return original(self, lo, hi, chunk)

    OffloadedState._write = write  # type: ignore[method-assign]  # this process alone
    rank_body(config, folder, False, ["digests"], "cpu")


def digests(config: TrainConfig, folder: Path, resume: bool = False) -> dict[int, list[Any]]:
    """Step -> what the ranks' parameters and optimizer were."""
    results = run_world(rank_body, config.world_size, config.to_dict(), str(folder), resume, ["digests"], "cpu")
    records = [record for result in results for record in result["records"]]
    return {s: [(r["params"], r["optimizer"]) for r in records if r["step"] == s] for s in range(7) if s or not resume}


@pytest.mark.slow
def test_a_crash_in_an_update_leaves_the_last_checkpoint_to_go_on_from(tmp_path: Path) -> None:
    whole, crashed = tmp_path / "whole", tmp_path / "crashed"
    whole.mkdir()
    crashed.mkdir()
    unbroken = digests(RUN, whole)
    with pytest.raises(LaunchError, match="rank 1"):
        run_world(killed_body, 2, RUN.to_dict(), str(crashed))
    assert sorted(p.name for p in crashed.iterdir()) == [
        "latest",
        "metrics-rank0.jsonl",
        "metrics-rank1.jsonl",
        "step-00000002",
    ]
    assert digests(RUN, crashed, resume=True)[6] == unbroken[6]


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("where", ["disk", "memory"])
def test_a_run_has_the_bytes_of_one_that_keeps_its_state(where: str, stage: int, tmp_path: Path) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    there.mkdir()
    here.mkdir()
    config = replace(RUN, zero_stage=stage, offload=where, checkpoint_step=0)
    assert digests(config, there) == digests(replace(config, offload="none"), here)


@pytest.mark.slow
def test_a_checkpoint_of_offloaded_state_goes_on_without_and_on_other_ranks(tmp_path: Path) -> None:
    exact = replace(RUN, reduction="exact")
    there = digests(exact, tmp_path)
    again = digests(replace(resized(exact, 1), offload="none"), tmp_path, resume=True)
    assert again[6][0][0] == there[6][0][0]
