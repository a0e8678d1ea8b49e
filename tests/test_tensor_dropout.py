"""Dropout under tensor parallelism: masks that differ inside regions and agree outside, from streams that leave no state."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tensor_cases import SIZES
from torch import Tensor

from minigpt_dist.launch import World
from minigpt_dist.model import MiniGPT
from minigpt_dist.parallel.tensor import TensorAxis, attention, tensor_parallel
from minigpt_dist.parallel.tensor.streams import RankDropout, rank_stream


@pytest.fixture(scope="module")
def two() -> Iterator[World]:
    with World(2, deadline_s=60) as live:
        yield live


def dropout_body(sequence: bool, train: bool = True) -> dict[str, Tensor]:
    """What dropout does in each place, and the shared stream's next number."""
    torch.manual_seed(5)
    model = tensor_parallel(MiniGPT(vocab=16, dropout=0.5, **SIZES), sequence_parallel=sequence).train(train)
    block = model.blocks[0]
    with torch.no_grad():
        for name in ("qkv", "proj"):
            block.attn.get_submodule(name).weight.fill_(0.1)  # heads alike, so that only masks tell them apart
    seen: list[Tensor] = []
    block.attn.proj.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach().clone()))
    torch.manual_seed(7)
    x = torch.ones(1, 8 // (dist.get_world_size() if sequence else 1), 16)
    block.attn(x)
    return {"heads": seen[0], "outside": block.drop(torch.ones(64)), "next": torch.rand(1)}


@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
def test_dropout_differs_inside_regions_and_agrees_outside_unless_the_sequence_is_cut(
    two: World, sequence: bool
) -> None:
    first, second = two.run(dropout_body, sequence)
    assert not torch.equal(first["heads"], second["heads"])
    assert torch.equal(first["outside"], second["outside"]) != sequence
    assert torch.equal(first["next"], second["next"])


def test_nothing_is_dropped_or_drawn_in_evaluation(two: World) -> None:
    first, second = two.run(dropout_body, True, False)
    assert torch.equal(first["heads"], second["heads"])
    torch.manual_seed(7)
    assert torch.equal(first["next"], torch.rand(1))


def one_stream_body(wrong: str) -> bool:
    """Are the two ranks' masks alike, though their streams should not be?"""
    shared = contextlib.nullcontext()
    with (
        mock.patch.object(attention, "rank_stream", mock.Mock(return_value=shared))
        if wrong
        else contextlib.nullcontext()
    ):
        heads = dropout_body(False)["heads"]
    both = [torch.empty_like(heads) for _ in range(2)]
    dist.all_gather(both, heads)
    return torch.equal(*both)


def test_heads_that_share_one_stream_would_be_seen(two: World) -> None:
    assert two.run(one_stream_body, "") == [False] * 2
    assert two.run(one_stream_body, "shared") == [True] * 2


def test_a_ranks_own_stream_leaves_no_state_behind() -> None:
    torch.manual_seed(3)
    with rank_stream(TensorAxis(), torch.device("cpu")):
        first = torch.rand(2)
    state = torch.get_rng_state()
    torch.manual_seed(3)
    with rank_stream(TensorAxis(), torch.device("cpu")):
        torch.rand(100)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(3)
    kept = RankDropout(0.5, TensorAxis())(torch.ones(50))
    torch.manual_seed(3)
    assert torch.equal(RankDropout(0.5, TensorAxis())(torch.ones(50)), kept)
    assert not torch.equal(first, torch.rand(2))
