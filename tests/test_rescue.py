"""A run that goes wrong goes back to its last good checkpoint, on all ranks, and ends where it would have ended."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor, nn

from minigpt_dist.checkpoint import latest_step_folder
from minigpt_dist.config import TrainConfig
from minigpt_dist.launch import RankError, run_world
from minigpt_dist.rescue import place
from minigpt_dist.runner import Worker
from minigpt_dist.worker import OURS

CONFIG = TrainConfig(world_size=2, steps=8, checkpoint_step=0, checkpoint_every=3, guard="replay")


def wrong_body(config: dict[str, Any], folder: str, what: str, at: int, times: int) -> dict[str, Any]:
    """A run in which the forward pass of update `at` goes wrong, the first `times` times that it is tried."""
    calls = {"tried": 0}
    rank, sizes = dist.get_rank(), TrainConfig.from_dict(config)
    corpus = OURS.corpus(sizes)
    bad_batch = corpus[(at - 1) * sizes.world_size * sizes.block_tokens :][: sizes.block_tokens - 1]

    def forward(model: nn.Module, ids: Tensor) -> Tensor:
        out: Tensor = model(ids)
        mine = ids.flatten().tolist() == (bad_batch.tolist() if rank == 0 else corpus_block(corpus, sizes, at).tolist())
        if not mine:
            return out
        calls["tried"] += 1
        if calls["tried"] > times:
            return out
        return {"nan on rank 1": out * (math.nan if rank == 1 else 1.0), "spike": out * 1e3}[what]

    worker = Worker(sizes, Path(folder), replace(OURS, forward=forward))
    return worker.run()


def corpus_block(corpus: Tensor, config: TrainConfig, at: int) -> Tensor:
    """What rank 1 reads in update `at`."""
    start = ((at - 1) * config.world_size + 1) * config.block_tokens
    return corpus[start : start + config.block_tokens - 1]


def run(folder: Path, what: str, at: int, times: int, **changes: Any) -> list[dict[str, Any]]:
    folder.mkdir(exist_ok=True)
    return run_world(wrong_body, 2, replace(CONFIG, **changes).to_dict(), str(folder), what, at, times)


def last(ranks: list[dict[str, Any]]) -> dict[str, str]:
    """Digests of rank 0's parameters after the last step."""
    found: dict[str, str] = ranks[0]["records"][-1]["params"]
    return found


@pytest.mark.parametrize(
    ("what", "at", "stage"),
    [
        pytest.param("spike", 2, 1, marks=pytest.mark.slow),
        ("nan on rank 1", 5, 1),
        *(pytest.param("nan on rank 1", 5, z, marks=pytest.mark.slow) for z in (2, 3)),
    ],
)
def test_a_replayed_step_ends_with_the_bytes_of_a_run_that_nothing_disturbed(
    tmp_path: Path, what: str, at: int, stage: int
) -> None:
    disturbed = run(tmp_path / "a", what, at, 1, zero_stage=stage)
    quiet = run(tmp_path / "b", what, at, 0, zero_stage=stage)
    assert last(disturbed) == last(quiet)
    assert [r["step"] for r in disturbed[0]["records"]] == list(range(9))
    assert [len(r["incidents"]) for r in disturbed + quiet] == [1, 1, 0, 0]


def test_a_skipped_batch_is_never_read_again_and_the_next_ones_move_up(tmp_path: Path) -> None:
    ranks = run(tmp_path / "a", "nan on rank 1", 5, 9, guard="skip")
    undisturbed = run(tmp_path / "b", "nan on rank 1", 5, 0, guard="skip", steps=9)
    read = [r["tokens"] for r in ranks[1]["records"]]
    wanted = [r["tokens"] for r in undisturbed[1]["records"]]
    assert read == wanted[:5] + wanted[6:]


@pytest.mark.slow
def test_what_was_skipped_is_in_the_checkpoint(tmp_path: Path) -> None:
    from minigpt_dist.checkpoint import load_resharded

    run(tmp_path, "nan on rank 1", 5, 9, guard="skip")
    assert latest_step_folder(tmp_path).name.endswith("6")
    assert [state["skipped"] for state in load_resharded(tmp_path, 2)] == [[5], [5]]


@pytest.mark.slow
def test_a_batch_that_stays_bad_ends_the_run_with_a_report(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="training stopped after 3 bad steps, of which 2 were rolled back"):
        run(tmp_path, "nan on rank 1", 5, 99, max_rollbacks=2)


@pytest.mark.slow
def test_without_a_guard_nothing_goes_back(tmp_path: Path) -> None:
    ranks = run(tmp_path, "nan on rank 1", 5, 1, guard="off")
    assert math.isnan(ranks[0]["records"][-1]["param_norm"])
    assert ranks[0]["incidents"] == []


def test_checkpoints_are_written_at_every_third_step(tmp_path: Path) -> None:
    ranks = run(tmp_path, "spike", 5, 0)
    assert ranks[0]["saved"] == 6
    assert sorted(int(p.name.split("-")[-1]) for p in tmp_path.glob("step-*")) == [0, 3, 6]


@pytest.mark.parametrize(
    ("skipped", "places"), [([], [1, 2, 3]), ([1], [2, 3, 4]), ([2, 3], [1, 4, 5]), ([1, 3], [2, 4, 5])]
)
def test_the_nth_update_reads_the_nth_batch_that_is_not_skipped(skipped: list[int], places: list[int]) -> None:
    assert [place(step, skipped) for step in (1, 2, 3)] == places
