"""A checkpoint that is not exactly what was saved is refused, in one line that names file, expected and found."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoint_cases import canonical, world_states
from forged_checkpoints import SHARD, STEP, forge, shard

from minigpt_dist.checkpoint import CheckpointError, latest_step_folder, load_shard, load_sharded, save_sharded
from minigpt_dist.checkpoint.manifest import MANIFEST_NAME


@pytest.fixture
def root(tmp_path: Path) -> Path:
    save_sharded(world_states(2, value=1.5), tmp_path / "root", 11)
    save_sharded(world_states(2), tmp_path / "root", 10)
    return tmp_path / "root"


FORGED: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "wrong schema name": (lambda d: d["schema"].update(name="other"), "expected schema .* found .*other"),
    "newer schema version": (lambda d: d["schema"].update(version=2), "expected schema .* found .*2"),
    "another step than the folder": (lambda d: d.update(step=12), "expected step 10, as its folder is named, found"),
    "more ranks than shards": (lambda d: d.update(world_size=3), "shards is not a list of 3"),
    "the same rank twice": (lambda d: d["shards"].reverse(), "not 'rank-00000-of-00002"),
    "no checksum": (shard("sha256", None), "sha256 is None"),
    "an empty checksum": (shard("sha256", ""), "sha256 is ''"),
    "no crc": (shard("crc32", None), "crc32 is None"),
    "a file elsewhere": (shard("file", "../" + SHARD), "is the file '../"),
    "an absolute file": (shard("file", "/" + SHARD), "is the file '/"),
    "a negative size": (shard("bytes", -1), "bytes is -1"),
    "a size that is no int": (shard("bytes", 10.0), "bytes is 10.0"),
    "a truth for a size": (shard("bytes", True), "bytes is True"),
    "another size": (shard("bytes", 10), f"{SHARD}: expected 10 bytes, found"),
    "another sha256": (shard("sha256", "0" * 64), f"{SHARD}: expected sha256 0000"),
    "other tensors": (shard("tensors", {}), f"{SHARD}: expected the tensors and slices of the manifest"),
    "other slices": (shard("slices", {}), f"{SHARD}: expected the tensors and slices of the manifest"),
    "a missing field": (lambda d: d["shards"][1].pop("sha256"), "shard 1 has the fields"),
    "an extra field": (lambda d: d.update(more=1), "manifest has the fields"),
    "shards that are no list": (lambda d: d.update(shards={}), "shards is not a list"),
    "a shard that is no object": (lambda d: d["shards"].__setitem__(1, 7), "shard 1 has the fields None"),
    "meta that is no object": (lambda d: d.update(meta=[]), "meta is not an object"),
    "a shape of words": (lambda d: d["shards"][1]["tensors"]["/rng"].update(shape=["a"]), "not a dtype and a list"),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_manifest_is_refused(name: str, root: Path) -> None:
    change, message = FORGED[name]
    forge(root / STEP, change)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_sharded(root / STEP, 2)
    assert "\n" not in str(caught.value)
    assert str(root / STEP) in str(caught.value)


def remove(path: Path) -> None:
    path.unlink()


def replace(path: Path, by: Callable[[Path], object]) -> None:
    path.unlink()
    by(path)


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def swap(folder: Path) -> None:
    (folder / SHARD).write_bytes((folder / SHARD.replace("00001-of", "00000-of")).read_bytes())


DAMAGED: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing shard": (lambda f: remove(f / SHARD), f"{SHARD}: expected a readable file, found FileNotFoundError"),
    "extra shard": (
        lambda f: shutil.copy(f / SHARD, f / "rank-00002-of-00003.safetensors"),
        "rank-00002-of-00003.safetensors: expected only the 2 shards",
    ),
    "truncated shard": (lambda f: os.truncate(f / SHARD, 100), rf"{SHARD}: expected \d+ bytes, found 100 bytes"),
    "longer shard": (
        lambda f: (f / SHARD).write_bytes((f / SHARD).read_bytes() + b"x"),
        rf"{SHARD}: expected \d+ bytes, found \d+ bytes",
    ),
    "another rank's shard": (swap, f"{SHARD}: expected sha256"),
    "a link": (lambda f: replace(f / SHARD, lambda p: p.symlink_to(f.parent / "step-00000011" / SHARD)), SHARD),
    "a pipe": (lambda f: replace(f / SHARD, os.mkfifo), f"{SHARD}: expected a regular file, found prw"),
    "a folder": (lambda f: replace(f / SHARD, os.mkdir), f"{SHARD}: expected a regular file"),
    "no manifest": (lambda f: remove(f / MANIFEST_NAME), "expected a file latest or manifest.json, found"),
    "half a manifest": (lambda f: os.truncate(f / MANIFEST_NAME, 100), "expected a JSON object, found JSONDecodeError"),
    "an empty manifest": (lambda f: os.truncate(f / MANIFEST_NAME, 0), "expected a JSON object"),
    "an altered manifest": (lambda f: edit(f / MANIFEST_NAME, '"step": 10', '"step": 12'), "expected checksum"),
    "a manifest in other words": (lambda f: edit(f / MANIFEST_NAME, "{", "{ "), "expected the canonical text"),
    "a manifest of nan": (
        lambda f: edit(f / MANIFEST_NAME, '"meta": {}', '"meta": {"a": NaN}'),
        "well-formed manifest",
    ),
    "a nesting bomb": (
        lambda f: (f / MANIFEST_NAME).write_text("[" * 100_000),
        "expected a JSON object, found Recursion",
    ),
    "a nested meta bomb": (
        lambda f: edit(f / MANIFEST_NAME, '"meta": {}', '"meta": {"a":' + "[" * 5000 + "]" * 5000 + "}"),
        "found RecursionError|well-formed manifest",
    ),
    "a manifest that is no object": (
        lambda f: (f / MANIFEST_NAME).write_text("[]"),
        "expected a JSON object, found list",
    ),
    "a manifest that is not ASCII": (lambda f: (f / MANIFEST_NAME).write_text("é"), "expected at most .* of ASCII"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_folder_is_refused(name: str, root: Path) -> None:
    damage, message = DAMAGED[name]
    damage(root / STEP)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_sharded(root / STEP, 2)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["missing shard", "extra shard", "truncated shard", "longer shard"])
def test_loading_one_rank_notices_what_is_wrong_with_the_others(name: str, root: Path) -> None:
    damage, message = DAMAGED[name]
    damage(root / STEP)
    with pytest.raises(CheckpointError, match=message):
        load_shard(root / STEP, 0, 2)


LATEST: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda f: remove(f), "expected a file latest or manifest.json, found"),
    "empty": (lambda f: os.truncate(f, 0), "expected a folder step-NNNNNNNN"),
    "out of the root": (lambda f: edit(f, STEP, "../" + STEP), "expected a folder step-NNNNNNNN"),
    "to another checkpoint": (lambda f: edit(f, STEP, "step-00000011"), "expected checksum .*, as in `latest`, found"),
    "to nothing": (
        lambda f: edit(f, STEP, "step-00000012"),
        "step-00000012: expected a checkpoint's folder, found File",
    ),
    "a link": (
        lambda f: replace(f, lambda p: p.symlink_to("step-00000011")),
        "latest: expected a readable file, found",
    ),
    "a folder": (lambda f: replace(f, os.mkdir), "latest: expected a regular file, found d"),
    "endless": (lambda f: f.write_text("x" * 10_000), "latest: expected at most 4096 bytes"),
}


@pytest.mark.parametrize("name", LATEST)
def test_a_damaged_pointer_is_refused(name: str, root: Path) -> None:
    damage, message = LATEST[name]
    damage(root / "latest")
    with pytest.raises(CheckpointError, match=message):
        load_sharded(root, 2)


def test_a_step_folder_that_is_a_link_is_not_followed(root: Path) -> None:
    (root / STEP).rename(root.parent / "elsewhere")
    (root / STEP).symlink_to(root.parent / "elsewhere")
    with pytest.raises(CheckpointError, match=f"{STEP}: expected a checkpoint's folder, found"):
        load_sharded(root, 2)


@pytest.mark.parametrize("expected", [1, 3, 4])
def test_another_world_size_is_refused_with_both_sizes(expected: int, root: Path) -> None:
    with pytest.raises(CheckpointError, match=f"manifest.json: expected world size {expected}, found 2"):
        load_sharded(root, expected)


@pytest.mark.parametrize("expected", [0, -1, 2.0, True, None, "2"])
def test_a_world_size_that_is_no_count_is_a_wrong_argument(expected: Any, root: Path) -> None:
    with pytest.raises(ValueError, match="expected_world_size is"):
        load_sharded(root, expected)


@pytest.mark.parametrize("where", ["nowhere", "file", "empty"])
def test_a_source_without_a_checkpoint_is_refused(where: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=f"{where}: expected a "):
        load_sharded(tmp_path / where, 1)


def test_the_old_checkpoint_loads_by_its_own_folder(root: Path) -> None:
    assert latest_step_folder(root) == root / STEP
    assert canonical(load_sharded(root / "step-00000011", 2)) == canonical(world_states(2, value=1.5))


def test_errors_are_one_line_whatever_a_forger_writes_into_a_name(root: Path) -> None:
    forge(root / STEP, shard("file", "a\nb\r\nc"))
    with pytest.raises(CheckpointError) as caught:
        load_sharded(root / STEP, 2)
    assert not re.search(r"[\r\n]", str(caught.value))
