"""How the broadcast at construction packs tensors into messages, and what it says of modules that differ; no ranks needed."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor, nn

from minigpt_dist.parallel import ddp


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each message that would leave rank 0 of two."""
    sent: list[int] = []

    def broadcast(tensor: Tensor, src: int, group: object) -> None:
        sent.append(tensor.nbytes)

    monkeypatch.setattr(ddp, "world", lambda group=None: (2, 0))
    monkeypatch.setattr(ddp, "exchange", lambda payload, group=None: [payload, payload])
    monkeypatch.setattr(ddp, "broadcast", broadcast)
    return sent


def module(*sizes: int) -> nn.Module:
    """Parameters of so many bytes each."""
    return nn.ParameterList(nn.Parameter(torch.zeros(size // 4)) for size in sizes)


@pytest.mark.parametrize(
    "sizes, expected",
    [
        ((40, 40, 40, 200, 40), [80, 40, 200, 40]),
        ((60, 40, 4), [100, 4]),  # exactly full
        ((200,), [200]),
        ((0, 40), [40]),
        ((0,), []),
    ],
)
def test_a_message_holds_what_fits_or_one_tensor(
    messages: list[int], monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...], expected: list[int]
) -> None:
    monkeypatch.setattr(ddp, "BUCKET_BYTES", 100)
    ddp.broadcast_parameters(module(*sizes))
    assert messages == expected


def test_a_message_is_at_most_32_mib(messages: list[int]) -> None:
    ddp.broadcast_parameters(module(2**24, 2**24, 4))
    assert messages == [2**25, 4]


@pytest.mark.parametrize(
    "theirs, words",
    [
        (["a (2,)", "b (3,)"], "a tensor of rank 1 is 2, but should be 1, as on rank 0"),
        ([], "a tensor of rank 1 is 0, but should be 1, as on rank 0"),
        (["b (2,)"], r"a tensor of rank 1 is b \(2,\), but should be a \(2,\), as on rank 0"),
    ],
)
def test_the_first_difference_between_ranks_is_named(
    monkeypatch: pytest.MonkeyPatch, theirs: list[str], words: str
) -> None:
    answers = iter([[b"x", b"y"], [json.dumps(["a (2,)"]).encode(), json.dumps(theirs).encode()]])
    monkeypatch.setattr(ddp, "exchange", lambda payload, group=None: next(answers))
    with pytest.raises(ValueError, match=words):
        ddp.require_same_on_all_ranks("a tensor", ["a (2,)"])


@pytest.mark.parametrize("src", [-1, 2])
def test_a_source_outside_the_world_is_refused_before_anything_is_sent(messages: list[int], src: int) -> None:
    with pytest.raises(ValueError, match=f"src is {src}, but should be a rank of the world, 0 to 1"):
        ddp.broadcast_parameters(module(4), src)
    assert messages == []


def test_modules_that_differ_are_refused_in_one_exchange_before_anything_is_sent(
    messages: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bytes] = []

    def exchange(payload: bytes, group: object = None) -> list[bytes]:
        asked.append(payload)
        return [payload, theirs or payload]

    theirs = b""
    monkeypatch.setattr(ddp, "exchange", exchange)
    ddp.broadcast_parameters(module(4))
    assert (len(asked), messages) == (1, [4])
    theirs = b'["0 (7,) torch.float32"]'
    with pytest.raises(ValueError, match=r"of rank 1 is 0 \(7,\) torch.float32, but should be 0 \(1,\) torch.float32"):
        ddp.broadcast_parameters(module(4))
    assert messages == [4]
