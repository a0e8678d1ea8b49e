"""The files of a checkpoint: the same bytes however ranks write them, in a format that others read; and ranks that do not agree."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_cases import canonical, on_ranks, world_states
from safetensors import safe_open

from minigpt_dist.checkpoint import CheckpointError, load_shard, load_sharded, read_manifest, save_shard, save_sharded


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_both_ways_of_writing_give_the_same_files_byte_for_byte(world_size: int, tmp_path: Path) -> None:
    states, meta = world_states(world_size), {"layout": {"dp": world_size}}
    save_sharded(states, tmp_path / "one", 10, meta=meta)

    def body(rank: int, exchange: Any) -> None:
        together = tmp_path / "all"
        save_shard(states[rank], together, 10, rank=rank, world_size=world_size, exchange=exchange, meta=meta)

    on_ranks(world_size, body)
    assert content(tmp_path / "one") == content(tmp_path / "all")


def test_the_manifest_says_step_world_layout_and_slices_and_nothing_of_this_machine(tmp_path: Path) -> None:
    given = save_sharded(world_states(2), tmp_path, 10, meta={"data": [1]})
    manifest = read_manifest(tmp_path / "step-00000010")
    assert manifest == given
    assert (manifest.step, manifest.world_size, manifest.meta) == (10, 2, {"data": [1]})
    assert vars(manifest.shards[1].slices["/optimizer/shards/0"]) == {"offset": 5, "numel": 5, "total": 10}
    assert manifest.shards[0].tensors["/model/w"].shape == (2, 3)
    assert str(tmp_path) not in manifest.to_json()


def test_one_rank_can_load_its_own_state_only(tmp_path: Path) -> None:
    states = world_states(3)
    save_sharded(states, tmp_path, 10)
    assert canonical(load_shard(tmp_path, 2, 3)) == canonical(states[2])
    with pytest.raises(ValueError, match="rank is 3"):
        load_shard(tmp_path, 3, 3)


def test_a_shard_is_plain_safetensors_that_the_library_reads(tmp_path: Path) -> None:
    save_sharded(world_states(1), tmp_path, 10)
    with safe_open(tmp_path / "step-00000010/rank-00000-of-00001.safetensors", "pt") as file:
        assert torch.equal(file.get_tensor("/optimizer/shards/0/master"), torch.arange(10) + 0.5)
        assert json.loads(file.metadata()["plain"])["tree"]["step"] == 10


def disagree(rank: int, exchange: Any, folder: Path) -> Any:
    return save_shard({}, folder, rank, rank=rank, world_size=2, exchange=exchange)


def test_ranks_that_disagree_on_the_step_all_raise_and_write_nothing(tmp_path: Path) -> None:
    errors = on_ranks(2, lambda rank, exchange: disagree(rank, exchange, tmp_path / "new"))
    assert {str(error) for error in errors} == {
        f"{tmp_path / 'new'}: expected the same step on all ranks, found ['step-00000000', 'step-00000001']"
    }
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("bad", [0, 2])
def test_a_bad_state_on_one_rank_raises_on_all_by_its_name(bad: int, tmp_path: Path) -> None:
    def body(rank: int, exchange: Any) -> Any:
        state = {"x": object()} if rank == bad else {}
        return save_shard(state, tmp_path / "new", 1, rank=rank, world_size=3, exchange=exchange)

    errors = on_ranks(3, body)
    assert all(isinstance(error, CheckpointError) for error in errors)
    assert all(f"rank {bad} failed first: ValueError: state/x" in str(error) for error in errors)
    assert not (tmp_path / "new").exists()


def test_a_world_size_that_the_exchange_does_not_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"expected a report of each of 2 ranks, found those of \[0\]"):
        save_shard({}, tmp_path / "new", 1, rank=0, world_size=2, exchange=lambda mine: [mine])


def test_no_rank_returns_before_rank_0_has_committed(tmp_path: Path) -> None:
    def body(rank: int, exchange: Any) -> Any:
        save_shard(world_states(4)[rank], tmp_path, 10, rank=rank, world_size=4, exchange=exchange)
        return canonical(load_sharded(tmp_path, 4))

    assert on_ranks(4, body) == [canonical(world_states(4))] * 4


def test_the_bytes_on_disk_are_those_of_schema_1(tmp_path: Path) -> None:
    """A checkpoint of one release loads in the next, byte for byte: another format is another version of the schema."""
    states = [{**state, "odd": torch.tensor([1 + 2j]), "nan": math.nan} for state in world_states(2)]
    save_sharded(states, tmp_path, 10, meta={"b": "\u00e9", "a": 1})
    found = {name: hashlib.sha256(raw).hexdigest()[:16] for name, raw in sorted(content(tmp_path).items())}
    assert found == {
        "latest": "372722cf5bc48ea4",
        "step-00000010/manifest.json": "85abd619bb377bdd",
        "step-00000010/rank-00000-of-00002.safetensors": "413475c786b33239",
        "step-00000010/rank-00001-of-00002.safetensors": "cb4e7d71a4839d8d",
    }


@pytest.mark.parametrize("rank", [-1, 2, True, 1.0])
def test_a_rank_that_is_none_of_the_checkpoints_is_refused(rank: Any, tmp_path: Path) -> None:
    save_sharded(world_states(2), tmp_path, 10)
    with pytest.raises(ValueError, match=r"rank is .*, but should be in range\(2\)"):
        load_shard(tmp_path, rank, 2)
