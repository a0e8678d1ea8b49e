"""What is saved comes back: every type, every bit; and nothing else can be saved."""

from __future__ import annotations

import dataclasses
import enum
import math
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_cases import canonical
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minigpt_dist.checkpoint import load_sharded, save_sharded
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


def test_a_large_state_is_written_in_chunks_and_hashed_alike(tmp_path: Path) -> None:
    state = {"model": {"w": torch.arange(5_000_000, dtype=torch.int32).view(torch.float32)}}
    save_sharded([state], tmp_path, 1)
    assert canonical(load_sharded(tmp_path, 1)[0]) == canonical(state)


def test_tensors_and_tree_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="no place in the tree for '/b'"):
        unflatten(FlatState({"/b": torch.ones(1)}, flatten({"a": torch.ones(1)}).plain))


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
