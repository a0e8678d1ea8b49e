"""Verifying checkpoints, and keeping the last few without losing the last good one."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_cases import canonical, world_states

from minigpt_dist.checkpoint import CheckpointError, keep_last, load_sharded, save_sharded, verify_checkpoint
from minigpt_dist.checkpoint.digest import SAMPLE_BYTES, FileDigest, sample_ranges
from minigpt_dist.checkpoint.folder import open_checkpoint
from minigpt_dist.checkpoint.lock import Hold, hold

SHARD = "rank-00000-of-00001.safetensors"


def save_steps(root: Path, *steps: int) -> None:
    for step in steps:
        save_sharded([{"w": torch.full((4,), float(step))}], root, step)


def kept(root: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in root.glob("step-*"))


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("mode", ["fast", "full"])
def test_both_modes_notice_any_byte_of_a_small_checkpoint(mode: Any, tmp_path: Path) -> None:
    save_sharded(world_states(2), tmp_path, 10)
    assert verify_checkpoint(tmp_path, mode).step == 10
    flip(tmp_path / "step-00000010/rank-00001-of-00002.safetensors", -3)
    with pytest.raises(CheckpointError, match=f"rank-00001.*expected {'crc32' if mode == 'fast' else 'sha256'}"):
        verify_checkpoint(tmp_path, mode)


def test_full_sees_what_fast_does_not_sample_in_a_large_file_and_so_does_loading(tmp_path: Path) -> None:
    save_sharded([{"w": torch.zeros(2 * SAMPLE_BYTES, dtype=torch.uint8)}], tmp_path, 1)
    file = tmp_path / "step-00000001" / SHARD
    flip(file, sample_ranges(file.stat().st_size)[5][1])
    assert verify_checkpoint(tmp_path, "fast").step == 1
    with pytest.raises(CheckpointError, match="expected sha256"):
        verify_checkpoint(tmp_path, "full")
    with pytest.raises(CheckpointError, match="expected sha256"):
        load_sharded(tmp_path, 1)


@pytest.mark.parametrize("where", [0, -1, 300])
def test_fast_samples_the_first_and_the_last_byte_of_a_large_file(where: int, tmp_path: Path) -> None:
    save_sharded([{"w": torch.zeros(2 * SAMPLE_BYTES, dtype=torch.uint8)}], tmp_path, 1)
    flip(tmp_path / "step-00000001" / SHARD, where)
    with pytest.raises(CheckpointError, match="expected crc32"):
        verify_checkpoint(tmp_path, "fast")


@pytest.mark.parametrize("nbytes", [0, 1, SAMPLE_BYTES, SAMPLE_BYTES + 1, 3 * SAMPLE_BYTES + 7])
def test_the_sample_is_in_order_inside_the_file_and_apart(nbytes: int) -> None:
    edges = [edge for part in sample_ranges(nbytes) for edge in part]
    assert edges == sorted(edges)
    assert (edges[0], edges[-1]) == (0, nbytes)


@pytest.mark.parametrize("pieces", [1, 7, 1 << 16, 1 << 30])
def test_a_digest_does_not_depend_on_the_pieces(pieces: int) -> None:
    data = memoryview(bytes(torch.arange(50_000, dtype=torch.int32).numpy().data))
    whole, cut = FileDigest(len(data)), FileDigest(len(data))
    whole.update(data)
    step = max(pieces, len(data) // 5000)
    for start in range(0, len(data), step):
        cut.update(data[start : start + step])
    assert (whole.sha256, whole.crc32) == (cut.sha256, cut.crc32)


def test_another_mode_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="mode is 'quick'"):
        verify_checkpoint(tmp_path, "quick")  # type: ignore[arg-type]  # that is the point


def test_the_last_k_are_kept_and_the_others_go(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2, 3, 4, 5)
    assert [path.name for path in keep_last(tmp_path, 2)] == ["step-00000001", "step-00000002", "step-00000003"]
    assert (kept(tmp_path), sorted(os.listdir(tmp_path))[0]) == ([4, 5], "latest")


@pytest.mark.parametrize("k", [3, 9])
def test_nothing_goes_while_there_are_no_more_than_k(k: int, tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2, 3)
    assert keep_last(tmp_path, k) == []
    assert kept(tmp_path) == [1, 2, 3]


def test_damaged_ones_do_not_count_so_the_last_good_one_stays(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2, 3, 4)
    for step in (3, 4):
        flip(tmp_path / f"step-{step:08d}" / SHARD, -1)
    keep_last(tmp_path, 1)
    assert kept(tmp_path) == [2, 3, 4]


def test_with_only_damaged_ones_nothing_goes(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2, 3)
    for step in (1, 2, 3):
        flip(tmp_path / f"step-{step:08d}" / SHARD, -1)
    assert keep_last(tmp_path, 1) == []
    assert kept(tmp_path) == [1, 2, 3]


def test_the_one_that_latest_names_stays_though_it_is_older(tmp_path: Path) -> None:
    save_steps(tmp_path, 5, 6, 7, 1)
    keep_last(tmp_path, 1)
    assert kept(tmp_path) == [1, 7]
    assert canonical(load_sharded(tmp_path, 1)) == canonical([{"w": torch.ones(4)}])


def test_one_that_is_being_read_stays_until_it_is_not(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2, 3)
    with open_checkpoint(tmp_path / "step-00000001"):
        assert [path.name for path in keep_last(tmp_path, 1)] == ["step-00000002"]
    assert [path.name for path in keep_last(tmp_path, 1)] == ["step-00000001"]


def test_saving_a_step_again_keeps_one_folder_unless_a_reader_holds_the_other(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 1, 1)
    assert len(list(tmp_path.glob("step-*"))) == 1
    with open_checkpoint(tmp_path):
        save_steps(tmp_path, 1)
        assert len(list(tmp_path.glob("step-*"))) == 2
    save_steps(tmp_path, 1)
    assert len(list(tmp_path.glob("step-*"))) == 1


def test_a_temporary_folder_in_use_is_not_swept_and_a_dead_one_is(tmp_path: Path) -> None:
    (tmp_path / ".tmp-live").mkdir()
    (tmp_path / ".tmp-dead").mkdir()
    with hold(tmp_path / ".tmp-live") as held:
        save_steps(tmp_path, 1)
    assert held is Hold.OURS
    assert sorted(path.name for path in tmp_path.glob(".tmp-*")) == [".tmp-live"]


def test_where_there_are_no_locks_a_folder_that_may_be_in_use_is_not_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "no locks here")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    (tmp_path / ".tmp-unknown").mkdir()
    save_steps(tmp_path, 1, 1, 2, 3)
    keep_last(tmp_path, 2)
    assert kept(tmp_path) == [2, 3]
    assert [path.name for path in tmp_path.glob(".tmp-*")] == [".tmp-unknown"]


def test_a_damaged_pointer_stops_the_clean_up(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2, 3)
    (tmp_path / "latest").write_text("?")
    with pytest.raises(CheckpointError, match="latest: expected a folder"):
        keep_last(tmp_path, 1)
    assert kept(tmp_path) == [1, 2, 3]


@pytest.mark.parametrize("k", [0, -1, 1.0, True, None])
def test_k_must_be_a_count(k: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="k is"):
        keep_last(tmp_path, k)


def test_a_root_that_is_missing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="new: expected a folder of checkpoints"):
        keep_last(tmp_path / "new", 1)
