"""Plain data and tensors cross the wire exactly; anything else is refused, on either side."""

from __future__ import annotations

import json
import math
import socket
import struct
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minigpt_dist.launch import WireError
from minigpt_dist.launch.arguments import pack, unpack
from minigpt_dist.launch.frames import FrameReader, send_frame
from minigpt_dist.launch.wire import _DTYPES, decode, encode

LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.binary(max_size=9)
    | st.text(st.characters(), max_size=9)
)
PLAIN = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=4), inner, max_size=4)
    ),
    max_leaves=12,
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["dict", "tuple", "bytes", "tensor", "int", "float", "x"]), inner, min_size=1, max_size=2
        )
    ),
    max_leaves=12,
)


def through(value: object) -> Any:
    header, blobs = encode(value)
    return decode(header, b"".join(bytes(blob) for blob in blobs))


def same(left: Any, right: Any) -> bool:
    """Equal in type and value at every depth, NaN equal to NaN, 0.0 not to -0.0."""
    if type(left) is not type(right):
        return False
    if isinstance(left, float):
        return struct.pack("d", left) == struct.pack("d", right) or (math.isnan(left) and math.isnan(right))
    if isinstance(left, torch.Tensor):
        return (left.dtype, left.shape, bits(left)) == (right.dtype, right.shape, bits(right))
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist()) if tensor.numel() else b""


@given(PLAIN)
def test_plain_data_comes_back_equal_in_type_and_value(value: object) -> None:
    assert same(through(value), value)


@given(st.binary(max_size=64), st.sampled_from(sorted(_DTYPES)))
def test_tensors_of_every_dtype_come_back_bit_for_bit(data: bytes, name: str) -> None:
    size = _DTYPES[name].itemsize
    data = bytes(byte & 1 for byte in data) if name == "bool" else data
    tensor = torch.tensor(list(data[: len(data) // size * size]), dtype=torch.uint8).view(_DTYPES[name])
    back = through({"t": tensor})["t"]
    assert back.dtype is tensor.dtype
    assert bits(back) == bits(tensor)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1, 1), (2, 3, 4)])
def test_shapes_come_back(shape: tuple[int, ...]) -> None:
    back = through(torch.ones(shape, dtype=torch.float64))
    assert back.shape == shape
    assert torch.equal(back, torch.ones(shape, dtype=torch.float64))


@given(st.binary(max_size=64), st.sampled_from(sorted(_DTYPES)))
def test_arguments_reach_a_rank_bit_for_bit(data: bytes, name: str) -> None:
    size = _DTYPES[name].itemsize
    data = bytes(byte & 1 for byte in data) if name == "bool" else data
    tensor = torch.tensor(list(data[: len(data) // size * size]), dtype=torch.uint8).view(_DTYPES[name])
    assert same(unpack(pack((tensor, {"t": [tensor, 1]}))), (tensor, {"t": [tensor, 1]}))


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (2, 3, 4)])
def test_an_argument_keeps_its_shape_and_is_the_ranks_own_to_write(shape: tuple[int, ...]) -> None:
    sent = torch.ones(shape)
    [taken] = unpack(pack((sent,)))
    taken.zero_()
    assert (taken.shape, torch.equal(sent, torch.ones(shape))) == (sent.shape, True)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).reshape(3, 4).t(),
        torch.arange(12.0)[::3],
        torch.ones(2, requires_grad=True),
        torch.nn.Parameter(torch.ones(2)),
        torch.ones(1).expand(5),
        torch.tensor([1 + 2j]).conj(),
    ],
    ids=["transposed", "strided", "requiring grad", "parameter", "expanded", "conjugate"],
)
def test_a_tensor_comes_back_as_plain_contiguous_values(tensor: torch.Tensor) -> None:
    back = through(tensor)
    assert type(back) is torch.Tensor
    assert torch.equal(back, tensor.detach())


def test_arguments_that_are_no_plain_tensor_go_by_pickle_as_they_are() -> None:
    transposed, trained = torch.arange(6.0).reshape(2, 3).t(), torch.nn.Parameter(torch.ones(2))
    first, second = unpack(pack((transposed, trained)))
    assert (first.stride(), type(second), second.requires_grad) == ((1, 3), torch.nn.Parameter, True)


def test_a_received_tensor_can_be_written_to() -> None:
    assert through(torch.zeros(2)).add_(1).tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": [0, {1}]}, r"result\['a'\]\[1\] is set"),
        ([{1: 2}], r"result\[0\] has the key 1 of type int"),
        ({"x": torch.float32}, r"result\['x'\] is torch.dtype"),
        (torch.ones(1).numpy()[0], "result is numpy.float32"),
        (torch.ones(2, device="meta"), "result is a .* on meta"),
        ([torch.eye(2).to_sparse()], r"result\[0\] is a torch.sparse_coo tensor"),
    ],
    ids=["set", "int key", "dtype", "numpy scalar", "meta tensor", "sparse tensor"],
)
def test_what_is_not_plain_is_refused_by_its_path(value: object, message: str) -> None:
    with pytest.raises(WireError, match=message):
        encode(value)


def test_a_value_that_holds_itself_is_refused() -> None:
    value: list[object] = []
    value.append(value)
    with pytest.raises(WireError, match="nested deeper"):
        encode(value)


@pytest.mark.parametrize("value", [b"x" * 101, "x" * 101, torch.zeros(26), torch.zeros(1).expand(1 << 40)])
def test_more_than_the_limit_is_refused(value: object) -> None:
    with pytest.raises(WireError, match="the limit is 100"):
        encode(value, limit=100)


@given(st.binary(max_size=80), st.binary(max_size=16))
def test_arbitrary_bytes_are_refused_or_decoded_but_never_crash(header: bytes, body: bytes) -> None:
    decodes_or_refuses(header, body)


@given(JSON, st.binary(max_size=16))
def test_arbitrary_json_is_refused_or_decoded_but_never_crashes(tree: object, body: bytes) -> None:
    decodes_or_refuses(json.dumps(tree).encode(), body)


@given(PLAIN, st.data())
def test_altered_messages_are_refused_or_decoded_but_never_crash(value: object, data: st.DataObject) -> None:
    header, blobs = encode([value, torch.arange(3), b"abc"])
    at = data.draw(st.integers(0, len(header) - 1))
    altered = header[:at] + data.draw(st.binary(min_size=1, max_size=2)) + header[at + 1 :]
    decodes_or_refuses(altered, b"".join(bytes(blob) for blob in blobs))


def decodes_or_refuses(header: bytes, body: bytes) -> None:
    try:
        value = decode(header, body)
    except WireError:
        return
    assert same(through(value), value)


@pytest.mark.parametrize(
    ("header", "body"),
    [
        (b'{"bytes":5}', b"abc"),
        (b'{"bytes":-1}', b"abc"),
        (b'{"bytes":true}', b"a"),
        (b"1", b"unclaimed"),
        (b'{"tensor":["float32",[2],4]}', b"abcd"),
        (b'{"tensor":["float32",[-1],0]}', b""),
        (b'{"tensor":["object",[1],8]}', b"abcdefgh"),
        (b'{"tensor":["float32",[0,4611686018427387904,4611686018427387904],0]}', b""),
        (b'{"dict":{"a":1,"a":2}}', b""),
        (b'{"unknown":1}', b""),
        (b'{"int":"ten"}', b""),
        (b"NaN", b""),
        (b"1e999", b""),
        (b"[" * 100_000, b""),
        (b"[" * 200 + b"]" * 200, b""),
        (b"\xff", b""),
    ],
)
def test_malformed_messages_are_refused(header: bytes, body: bytes) -> None:
    with pytest.raises(WireError):
        decode(header, body)


def test_frames_arrive_whole_however_they_are_cut() -> None:
    left, right = socket.socketpair()
    with left, right:
        reader = FrameReader(right, 1000)
        send_frame(left, b"head", [b"one", memoryview(b"two")])
        sent = right.recv(1000)
        for byte in sent[:-1]:
            left.send(bytes([byte]))
            assert reader.read(block=False) is None
        left.send(sent[-1:])
        assert reader.read(block=False) == (b"head", bytearray(b"onetwo"))


def test_a_frame_that_announces_too_much_is_refused_before_it_is_read() -> None:
    left, right = socket.socketpair()
    with left, right:
        left.send(struct.pack("!4sQQ", b"mgd1", 10, 1 << 60))
        with pytest.raises(WireError, match="the limit is 1000"):
            FrameReader(right, 1000).read()


def test_a_header_has_a_limit_of_its_own_and_memory_is_taken_as_bytes_arrive() -> None:
    left, right = socket.socketpair()
    with left, right:
        reader = FrameReader(right, 1 << 40, 100)
        left.sendall(struct.pack("!4sQQ", b"mgd1", 4, 1 << 39) + b"head" + b"body")
        assert reader.read(block=False) is None
        assert len(reader._target) < 1 << 24
    left, right = socket.socketpair()
    with left, right:
        left.sendall(struct.pack("!4sQQ", b"mgd1", 101, 0))
        with pytest.raises(WireError, match="header of 101 bytes"):
            FrameReader(right, 1 << 40, 100).read()


def test_a_frame_of_another_kind_is_refused() -> None:
    left, right = socket.socketpair()
    with left, right:
        left.send(b"HTTP/1.1 200 OK\r\n\r\n.")
        with pytest.raises(WireError, match="begins with b'HTTP'"):
            FrameReader(right, 1000).read()
