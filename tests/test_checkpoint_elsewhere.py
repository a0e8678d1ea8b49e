"""Checkpoints in other places and formats: a second tier, a plain safetensors file, torch's own format."""

from __future__ import annotations

import os
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_cases import canonical, rank_state, world_states

from minigpt_dist.checkpoint import (
    CheckpointError,
    SecondTier,
    export_dcp,
    export_safetensors,
    import_dcp,
    import_safetensors,
    latest_step_folder,
    load_sharded,
    read_manifest,
    save_sharded,
    second_tier,
    split_state,
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    save_sharded(world_states(3), tmp_path / "root", 10)
    return tmp_path / "root"


def test_the_second_tier_is_a_checkpoint_of_its_own(root: Path, tmp_path: Path) -> None:
    with SecondTier(tmp_path / "tier") as tier:
        tier.submit(latest_step_folder(root))
    (report,) = tier.reports
    assert (report.outcome, report.attempts) == ("copied", 1)
    assert read_manifest(latest_step_folder(tmp_path / "tier")) == read_manifest(latest_step_folder(root))
    assert canonical(load_sharded(tmp_path / "tier", 3)) == canonical(world_states(3))


def copies_fail(failures: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next `failures` copies fail."""
    real, left = second_tier.copy_checkpoint, [failures]

    def copy(source: Any, target: Any) -> Any:
        left[0] -= 1
        if left[0] >= 0:
            raise CheckpointError("the store is away")
        return real(source, target)

    monkeypatch.setattr(second_tier, "copy_checkpoint", copy)


def test_a_copy_is_tried_again(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copies_fail(2, monkeypatch)
    with SecondTier(tmp_path / "tier", retries=2, pause=0) as tier:
        tier.submit(latest_step_folder(root))
    assert [(report.outcome, report.attempts) for report in tier.reports] == [("copied", 3)]


def test_but_not_for_ever_and_the_failure_is_told(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copies_fail(2, monkeypatch)
    tier = SecondTier(tmp_path / "tier", retries=1, pause=0)
    tier.submit(latest_step_folder(root))
    with pytest.raises(CheckpointError, match="tier: second tier is incomplete: step-00000010: the store is away"):
        tier.close()
    assert [(report.outcome, report.attempts, report.cause) for report in tier.reports] == [
        ("failed", 2, "the store is away")
    ]
    tier.close()


def test_a_damaged_source_is_not_copied(root: Path, tmp_path: Path) -> None:
    shard = next(root.glob("step-*/rank-00001*"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    with pytest.raises(CheckpointError, match=r"rank-00001-of-00003.safetensors: expected sha256"):
        second_tier.copy_checkpoint(root, tmp_path / "tier")
    assert os.listdir(tmp_path / "tier") == []


def test_submitting_never_waits_and_a_slow_store_skips_to_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, go, copied = threading.Event(), threading.Event(), list[str]()

    def copy(source: Path, target: Path) -> None:
        copied.append(source.name)
        started.set()
        assert go.wait(10)

    monkeypatch.setattr(second_tier, "copy_checkpoint", copy)
    with SecondTier(tmp_path) as tier:
        tier.submit("step-1")
        assert started.wait(10)
        tier.submit("step-2")
        tier.submit("step-3")
        go.set()
    assert copied == ["step-1", "step-3"]
    assert sorted((r.folder.name, r.outcome) for r in tier.reports)[1] == ("step-2", "replaced")


def test_a_store_that_hangs_is_an_error_after_the_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    monkeypatch.setattr(second_tier, "copy_checkpoint", lambda source, target: go.wait(10))
    tier = SecondTier(tmp_path)
    tier.submit("step-1")
    with pytest.raises(CheckpointError, match="second tier is incomplete: not done after 0 s"):
        tier.close(timeout=0)
    go.set()


def test_a_closed_tier_takes_nothing(tmp_path: Path) -> None:
    tier = SecondTier(tmp_path)
    tier.close()
    with pytest.raises(ValueError, match="closed"):
        tier.submit(tmp_path)


@pytest.mark.parametrize("wrong", [{"retries": -1}, {"retries": 1.5}, {"pause": -1}, {"pause": float("nan")}])
def test_retries_and_pause_must_make_sense(wrong: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="retries and pause are"):
        SecondTier(tmp_path, **wrong)


def test_the_model_alone_goes_to_a_plain_file_and_back(root: Path, tmp_path: Path) -> None:
    export_safetensors(root, tmp_path / "model.safetensors")
    export_safetensors(root, tmp_path / "model.safetensors")
    back, model = import_safetensors(tmp_path / "model.safetensors"), rank_state(0, 3)["model"]
    assert canonical({name: back[name] for name in model}) == canonical(model)
    assert sorted(os.listdir(tmp_path)) == ["model.safetensors", "root"]


@pytest.mark.parametrize("state", [{}, {"model": [torch.ones(1)]}, {"model": {"a": 1}}, {"model": {"a": {}}}])
def test_a_state_without_a_plain_model_is_not_exported(state: Any, tmp_path: Path) -> None:
    save_sharded([state], tmp_path / "root", 1)
    with pytest.raises(CheckpointError, match=r"expected a .* at .*model"):
        export_safetensors(tmp_path / "root", tmp_path / "model.safetensors")
    assert os.listdir(tmp_path) == ["root"]


def test_a_plain_file_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x" * 100)
    for name in ("file", "missing"):
        with pytest.raises(CheckpointError, match=f"{name}: expected a"):
            import_safetensors(tmp_path / name)


def test_a_checkpoint_goes_to_torchs_own_format_and_back_with_its_bits(root: Path, tmp_path: Path) -> None:
    export_dcp(root, tmp_path / "dcp")
    whole = import_dcp(tmp_path / "dcp")
    assert canonical(whole) == canonical({**rank_state(0, 1), "rng": None})
    assert canonical(split_state(whole, 2)[1]) == canonical({**rank_state(1, 2), "rng": None})
    assert sorted(os.listdir(tmp_path)) == ["dcp", "root"]


@pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)", "ignore:TypedStorage is deprecated")
def test_torch_itself_reads_what_was_exported_by_dotted_names(root: Path, tmp_path: Path) -> None:
    from torch.distributed.checkpoint.state_dict_loader import load

    export_dcp(root, tmp_path / "dcp")
    wanted = {"model.w": torch.zeros(2, 3), "optimizer.shards.0.master": torch.zeros(10)}
    load(wanted, checkpoint_id=tmp_path / "dcp")
    assert torch.equal(wanted["optimizer.shards.0.master"], torch.arange(10) + 0.5)
    assert torch.equal(wanted["model.w"], rank_state(0, 1)["model"]["w"])


@pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)", "ignore:TypedStorage is deprecated")
def test_a_model_that_torch_saved_is_imported(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.state_dict_saver import save

    save({"model": {"a": torch.ones(2)}, "epoch": 3}, checkpoint_id=tmp_path / "dcp")
    assert canonical(import_dcp(tmp_path / "dcp")) == canonical({"model": {"a": torch.ones(2)}})


class Payload:
    def __init__(self, sentinel: Path) -> None:
        self.sentinel = sentinel

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.sentinel),)


def test_an_index_that_would_run_code_is_refused_and_does_not_run(root: Path, tmp_path: Path) -> None:
    export_dcp(root, tmp_path / "dcp")
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(Payload(tmp_path / "ran")))
    with pytest.raises(CheckpointError, match=r"dcp: expected a well-formed DCP folder, found .*mkdir does not"):
        import_dcp(tmp_path / "dcp")
    assert not (tmp_path / "ran").exists()


def test_a_folder_that_exists_is_not_written_over_and_a_missing_one_is_not_read(root: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="root exists"):
        export_dcp(root, root)
    with pytest.raises(CheckpointError, match="expected a readable DCP folder, found FileNotFoundError"):
        import_dcp(tmp_path / "missing")
