"""Exact reduction: the same global batch gives the same bytes at every world size, also across a resume at another one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from minigpt_dist.config import TrainConfig
from minigpt_dist.launch import run_world
from minigpt_dist.worker import rank_body, resized

WHOLE = TrainConfig(world_size=8, micro_batches=1, steps=6, checkpoint_step=3, reduction="exact", batch=2)


def train(config: TrainConfig, folder: Path, resume: bool = False) -> dict[int, dict[str, str]]:
    """Step -> parameter digests on rank 0, after checking that all ranks agree."""
    results = run_world(rank_body, config.world_size, config.to_dict(), str(folder), resume, ["digests"], "cpu")
    by_step: dict[int, dict[str, str]] = {}
    for result in results:
        for record in result["records"]:
            assert by_step.setdefault(record["step"], record["params"]) == record["params"]
    return by_step


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, dict[str, str]]]:
    folder = tmp_path_factory.mktemp("unbroken")
    return folder, train(WHOLE, folder)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_world_size_gives_identical_bytes_at_every_step(unbroken: Any, world_size: int, tmp_path: Path) -> None:
    assert train(resized(WHOLE, world_size), tmp_path) == unbroken[1]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_checkpoint_of_eight_ranks_resumes_elsewhere_with_the_same_bytes(unbroken: Any, world_size: int) -> None:
    folder, whole = unbroken
    assert train(resized(WHOLE, world_size), folder, resume=True) == {step: whole[step] for step in (3, 4, 5, 6)}


def test_checkpoint_of_two_ranks_resumes_at_eight_with_the_same_bytes(unbroken: Any, tmp_path: Path) -> None:
    train(resized(WHOLE, 2), tmp_path)
    assert train(WHOLE, tmp_path, resume=True)[6] == unbroken[1][6]


@pytest.mark.slow
def test_exact_mode_with_dropout_is_independent_of_world_size(tmp_path: Path) -> None:
    config = TrainConfig.from_dict(
        {**WHOLE.to_dict(), "model": {**WHOLE.to_dict()["model"], "dropout": 0.1}, "steps": 2, "checkpoint_step": 0}
    )
    assert train(config, tmp_path) == train(resized(config, 2), tmp_path)


@pytest.mark.slow
def test_plain_sums_do_depend_on_world_size(tmp_path: Path) -> None:
    plain = TrainConfig.from_dict({**WHOLE.to_dict(), "reduction": "sum", "steps": 3, "checkpoint_step": 0})
    assert train(plain, tmp_path)[3] != train(resized(plain, 2), tmp_path)[3]


def test_a_world_size_that_does_not_divide_the_batch_is_refused() -> None:
    with pytest.raises(
        ValueError, match="world_size is 3, but should be one of 1, 2, 4, 8, which divide the 8 micro-batches"
    ):
        resized(WHOLE, 3)
