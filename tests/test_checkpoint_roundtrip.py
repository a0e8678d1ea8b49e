"""What is saved comes back: every type, every bit; and nothing else can be saved."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_cases import canonical, on_ranks, world_states
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from minigpt_dist.checkpoint import CheckpointError, load_shard, load_sharded, read_manifest, save_shard, save_sharded
from minigpt_dist.checkpoint.manifest import Manifest
from minigpt_dist.checkpoint.shard_file import FORMAT_DTYPES, RAW_DTYPES, encode_shard, read_shard, write_shard
from minigpt_dist.checkpoint.state import FlatState, flatten, unflatten

ONE_FOLDER = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
DTYPES = [*FORMAT_DTYPES, *RAW_DTYPES.values()]
KEYS = st.text(st.characters(exclude_categories=["Cs"]), max_size=6) | st.sampled_from(["/", "~", "~1", "a/b", "", "0"])
SCALARS = st.none() | st.booleans() | st.integers() | st.text() | st.floats().filter(lambda x: not math.isnan(x))


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Any dtype, shape (0-d and empty too) and bytes, half of them not contiguous."""
    dtype, shape = draw(st.sampled_from(DTYPES)), draw(st.lists(st.integers(0, 3), max_size=3))
    nbytes = math.prod(shape) * dtype.itemsize
    seed = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    content = torch.randint(0, 2 if dtype == torch.bool else 256, (nbytes,), dtype=torch.uint8, generator=seed)
    tensor = content.view(dtype).reshape(shape)
    return tensor.mT if tensor.dim() >= 2 and draw(st.booleans()) else tensor


STATES = st.dictionaries(
    KEYS,
    st.recursive(
        SCALARS | tensors(), lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3)
    ),
    max_size=4,
)


@ONE_FOLDER
@given(state=STATES)
def test_any_state_comes_back_with_the_same_types_and_bits(state: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "shard"
    file.unlink(missing_ok=True)
    back = read_shard(file, write_shard(file, encode_shard(state)))
    assert canonical(back) == canonical(state)


@pytest.mark.parametrize("bits", ["7ff8000000000000", "fff8000000000123", "7ff0000000000000", "8000000000000000"])
def test_floats_that_json_lacks_keep_their_bits(bits: str) -> None:
    value = struct.unpack(">d", bytes.fromhex(bits))[0]
    assert struct.pack(">d", unflatten(flatten({"x": value}))["x"]).hex() == bits


def test_a_tuple_comes_back_as_a_list_and_a_parameter_as_a_tensor(tmp_path: Path) -> None:
    save_sharded([{"betas": (0.9, (1, 2)), "p": torch.nn.Parameter(torch.ones(2))}], tmp_path, 0)
    (state,) = load_sharded(tmp_path, 1)
    assert (state["betas"], type(state["p"])) == ([0.9, [1, 2]], torch.Tensor)


class Color(enum.IntEnum):
    RED = 1


@dataclasses.dataclass
class Point:
    x: int = 0


REFUSED = {
    "an object": Point(),
    "a type": int,
    "bytes": b"x",
    "a set": {1},
    "an int that is an enum": Color.RED,
    "complex": 1j,
    "a sparse tensor": torch.ones(2, 2).to_sparse(),
    "a meta tensor": torch.ones(2, device="meta"),
    "a key that is no str": {1: 2},
    "a key that is not Unicode": {"\ud800": 2},
    "an endless int": 1 << 10_000,
}


@pytest.mark.parametrize("name", REFUSED)
def test_anything_else_is_refused_by_its_path_before_anything_is_written(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^state/a/1"):
        save_sharded([{}, {"a": [0, REFUSED[name]]}], tmp_path / "new", 0)
    assert not (tmp_path / "new").exists()


def test_a_state_that_contains_itself_is_refused() -> None:
    state: dict[str, Any] = {}
    state["again"] = state
    with pytest.raises(ValueError, match="nested deeper than 64"):
        encode_shard(state)


@pytest.mark.parametrize("step", [-1, 1.0, True, "1", None, 10**18])
def test_a_wrong_step_is_refused_before_anything_is_written(step: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="step is"):
        save_sharded([{}], tmp_path / "new", step)
    assert not (tmp_path / "new").exists()


DEEP: list[Any] = []
for _ in range(64):
    DEEP = [DEEP]


@pytest.mark.parametrize("meta", [{1: 2}, {"a": (1,)}, {"a": math.nan}, {"a": {1}}, [1], {"a": DEEP}])
def test_meta_that_would_not_come_back_equal_is_refused(meta: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="meta must be"):
        save_sharded([{}], tmp_path / "new", 0, meta=meta)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("states", [[], {}, {0: {}}])
def test_per_rank_state_must_be_a_sequence_of_states(states: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="per_rank_state should be"):
        save_sharded(states, tmp_path / "new", 0)


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


def test_a_large_state_is_written_in_chunks_and_hashed_alike(tmp_path: Path) -> None:
    state = {"model": {"w": torch.arange(5_000_000, dtype=torch.int32).view(torch.float32)}}
    save_sharded([state], tmp_path, 1)
    assert canonical(load_sharded(tmp_path, 1)[0]) == canonical(state)


def test_tensors_and_tree_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="no place in the tree for '/b'"):
        unflatten(FlatState({"/b": torch.ones(1)}, flatten({"a": torch.ones(1)}).plain))


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


def test_meta_of_the_greatest_depth_and_of_none_comes_back(tmp_path: Path) -> None:
    deep: Any = {}
    for _ in range(64):
        deep = {"a": deep}
    assert save_sharded([{}], tmp_path, 0, meta=deep).meta == deep
    assert save_sharded([{}], tmp_path, 1).meta == Manifest(1, 0, ()).meta == {}
    with pytest.raises(ValueError, match="meta must be nested at most 64 deep"):
        save_sharded([{}], tmp_path, 2, meta={"a": deep})


def test_a_state_of_the_greatest_depth_and_int_comes_back() -> None:
    deep: Any = (1 << 8192) - 1
    for i in range(64):
        deep = {"a": deep} if i % 2 else [deep]
    assert unflatten(flatten(deep)) == deep
    with pytest.raises(ValueError, match="nested deeper than 64"):
        flatten({"a": [deep]})
    with pytest.raises(ValueError, match="int of 8193 bits, at most 8192"):
        flatten({"a": 1 << 8192})


def test_tensors_without_a_place_are_named_the_first_of_them() -> None:
    tensors = {"/b": torch.ones(1), "/a": torch.ones(1), "/c": torch.ones(1)}
    with pytest.raises(ValueError, match="no place in the tree for '/a'"):
        unflatten(FlatState(tensors, flatten({"x": 1}).plain))


@pytest.mark.parametrize("name", ["NaN", "Infinity", "-Infinity"])
def test_a_number_that_is_no_json_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is not JSON"):
        unflatten(FlatState({}, f'{{"tree":{{"x":{name}}},"nonfinite":{{}}}}'))


@pytest.mark.parametrize("rank", [-1, 2, True, 1.0])
def test_a_rank_that_is_none_of_the_checkpoints_is_refused(rank: Any, tmp_path: Path) -> None:
    save_sharded(world_states(2), tmp_path, 10)
    with pytest.raises(ValueError, match=r"rank is .*, but should be in range\(2\)"):
        load_shard(tmp_path, rank, 2)
