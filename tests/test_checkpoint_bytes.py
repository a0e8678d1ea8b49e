"""No byte of a checkpoint can be altered unnoticed, and a shard that lies about itself is refused however well it is sealed."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from forged_checkpoints import STEP, forge
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minigpt_dist.checkpoint import CheckpointError, load_sharded, save_sharded


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A checkpoint's files by name, next to another one that a wrong pointer could lead to."""
    root = tmp_path_factory.mktemp("one")
    save_sharded([{"w": torch.ones(3)}], root, 11)
    save_sharded([{"w": torch.zeros(3)}], root, 10)
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def write_all(root: Path, files: dict[str, bytes]) -> None:
    shutil.rmtree(root, ignore_errors=True)
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150)
@given(data=st.data())
def test_no_byte_of_a_checkpoint_can_be_altered_or_cut_off_unnoticed(
    data: st.DataObject, one: Any, tmp_path: Path
) -> None:
    name = data.draw(st.sampled_from([name for name in sorted(one) if "step-00000011" not in name]))
    at = data.draw(st.integers(0, len(one[name]) - 1))
    flip = data.draw(st.integers(0, 255))
    altered = bytearray(one[name])
    altered[at] ^= flip
    write_all(tmp_path / "root", {**one, name: bytes(altered) if flip else one[name][:at]})
    with pytest.raises(CheckpointError):
        load_sharded(tmp_path / "root", 1)


def well_sealed(root: Path, content: bytes) -> None:
    """Puts `content` in place of the shard of `root`'s step 10, with a manifest that vouches for it."""
    file = root / STEP / "rank-00000-of-00001.safetensors"
    file.write_bytes(content)
    facts = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    forge(root / STEP, lambda document: document["shards"][0].update(facts))


def header(text: str | bytes, length: int | None = None, body: bytes = b"") -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return (len(raw) if length is None else length).to_bytes(8, "little") + raw + body


PLAIN = '{"__metadata__":{"format":"pt","plain":%s,"raw":"{}"}}'
LYING = {
    "nothing": b"",
    "not even a length": b"1234",
    "a header longer than the file": header("{}", length=1 << 40),
    "a header that is no JSON": header("{"),
    "a header that nests too deep": header('{"a":' + "[" * 50_000 + "]" * 50_000 + "}"),
    "no metadata": header("{}"),
    "a tensor beyond the end": header('{"w":{"dtype":"F32","shape":[3],"data_offsets":[0,12]}}'),
    "a tensor whose shape lies": header('{"w":{"dtype":"F32","shape":[9],"data_offsets":[0,12]}}', body=b"0" * 12),
    "a shape that overflows": header(
        f'{{"w":{{"dtype":"F32","shape":[{1 << 63},{1 << 63}],"data_offsets":[0,12]}}}}', body=b"0" * 12
    ),
    "bytes that belong to nobody": header(PLAIN % json.dumps(json.dumps({"tree": {}, "nonfinite": {}})), body=b"00"),
    "metadata that is no JSON": header(PLAIN % '"{"'),
    "metadata without a tree": header(PLAIN % '"{}"'),
    "a tree that is no mapping": header(PLAIN % json.dumps('{"tree":[],"nonfinite":{}}')),
    "a tree that nests too deep": header(PLAIN % json.dumps('{"tree":' + "[" * 50_000 + "]" * 50_000 + "}")),
    "a float of no bits": header(PLAIN % json.dumps('{"tree":{"a":null},"nonfinite":{"/a":"00"}}')),
    "a dtype that does not exist": header(
        '{"__metadata__":{"plain":"","raw":"{\\"/w\\":[\\"nope\\",[]]}"},'
        '"/w":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}',
        body=b"0000",
    ),
}


@pytest.mark.parametrize("name", LYING)
def test_a_shard_that_lies_about_itself_is_refused_even_where_every_checksum_fits(
    name: str, one: dict[str, bytes], tmp_path: Path
) -> None:
    write_all(tmp_path, one)
    well_sealed(tmp_path, LYING[name])
    with pytest.raises(CheckpointError, match=r"rank-00000-of-00001.safetensors: expected (a well-formed|the tensors)"):
        load_sharded(tmp_path / STEP, 1)
