"""Recomputation: the plain run's bits from a fraction of its activations, whatever a block reads beside its input."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from minigpt_dist.activations import SavedBytes
from minigpt_dist.launch import World
from minigpt_dist.loss import next_token_loss
from minigpt_dist.model import MiniGPT
from minigpt_dist.parallel import recompute
from minigpt_dist.parallel.data_parallel import DistributedDataParallel
from minigpt_dist.parallel.recompute import recompute_blocks, recomputed
from minigpt_dist.parallel.tensor import tensor_parallel, token_loss

B, S, E = 2, 8, 16
Change = Callable[[MiniGPT], object]


@pytest.fixture(scope="module")
def one() -> Iterator[World]:
    with World(1, deadline_s=60) as live:
        yield live


@pytest.fixture(scope="module")
def two() -> Iterator[World]:
    with World(2, deadline_s=60) as live:
        yield live


class CountingBlock(nn.Module):
    """A block whose output depends on how often it has run."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(E, E)
        self.register_buffer("runs", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        runs = self.get_buffer("runs")
        runs += 1
        return x + torch.tanh(self.inner(x) * float(runs))


def built(layers: int = 3, dropout: float = 0.3) -> MiniGPT:
    torch.manual_seed(0)
    model = MiniGPT(vocab=12, embed_dim=E, num_heads=2, num_layers=layers, seq_len=S, dropout=dropout)
    model.blocks.append(CountingBlock())
    return model


def from_the_first_blocks_input(model: MiniGPT) -> None:
    """Every block recomputes from what the first one was given."""
    first: list[Tensor] = []

    def run(forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        first.append(x)
        return forward(first[0] if torch.is_grad_enabled() else x)

    for block in model.blocks:
        block.forward = partial(recomputed, partial(run, block.forward), block)


RIGHT: dict[str, Change] = {"kept": lambda model: model, "recomputed": recompute_blocks}
WRONG: dict[str, Change] = {
    "random numbers are drawn anew": recompute_blocks,
    "buffers are those of now": recompute_blocks,
    "another input": from_the_first_blocks_input,
}
FORGETTING = {
    "random numbers are drawn anew": (torch, "set_rng_state"),
    "buffers are those of now": (recompute, "_put"),
}


def bits_body(how: str, tensor: bool = False, dropout: float = 0.3) -> dict[str, Tensor]:
    """Losses, gradients, buffers and the next random number after two forwards and, the later one's first, their backwards."""
    model = built(dropout=dropout)
    if tensor:
        del model.blocks[-1]
        tensor_parallel(model, sequence_parallel=True)
    {**RIGHT, **WRONG}[how](model)
    forgotten = mock.patch.object(*FORGETTING[how]) if how in FORGETTING else contextlib.nullcontext()
    ids = torch.arange(B * S).view(B, S) % 12
    with forgotten:
        losses = []
        for seed in (1, 2):
            torch.manual_seed(seed)
            losses.append(token_loss(model, model(ids), ids) if tensor else next_token_loss(model(ids), ids))
        for loss in reversed(losses):
            loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"losses": torch.stack(losses).detach(), "next": torch.rand(1), **grads, **dict(model.named_buffers())}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_gradients_buffers_and_random_numbers_have_the_bits_of_the_plain_run(one: World, dropout: float) -> None:
    assert same(*(one.run(bits_body, how, False, dropout)[0] for how in RIGHT))


def test_so_they_have_under_tensor_parallelism_with_dropout(two: World) -> None:
    plain, again = (two.run(bits_body, how, True) for how in RIGHT)
    assert all(same(a, b) for a, b in zip(plain, again, strict=True))


@pytest.mark.parametrize("wrong", WRONG)
def test_a_second_forward_that_is_not_the_first_ones_equal_is_seen(one: World, wrong: str) -> None:
    dropout = 0.3 if "random" in wrong else 0.0
    assert not same(*(one.run(bits_body, how, False, dropout)[0] for how in ("kept", wrong)))


def kept_body(how: str, layers: int) -> tuple[int, int, int]:
    """Bytes kept after forward, at most, and after backward."""
    model = built(layers, dropout=0.0)
    del model.blocks[-1]
    RIGHT[how](model)
    ids = torch.arange(B * S).view(B, S) % 12
    with SavedBytes(model.parameters()) as kept:
        loss = next_token_loss(model(ids), ids)
        after = kept.now
        loss.backward()
    return after, kept.peak, kept.now


def test_a_block_keeps_its_input_and_the_random_state_alone(one: World) -> None:
    few, many = (one.run(kept_body, "recomputed", layers)[0][0] for layers in (2, 6))
    assert many - few == 4 * (4 * B * S * E + torch.get_rng_state().nbytes)


def test_at_most_one_blocks_activations_are_kept_beside_the_inputs_and_none_after_backward(one: World) -> None:
    (few, *_), (many, *_) = (one.run(kept_body, "kept", layers)[0] for layers in (2, 6))
    block = (many - few) // 4
    start, most, left = one.run(kept_body, "recomputed", 6)[0]
    assert start < most <= start + block < many
    assert left == 0


def wrapped_body(how: str) -> dict[str, Tensor]:
    """Gradients under our data-parallel wrapper, whose hooks start exchanges."""
    model = built(dropout=0.0)
    del model.blocks[-1]
    RIGHT[how](model)
    wrapped = DistributedDataParallel(model, bucket_mb=0.01)
    ids = (torch.arange(B * S).view(B, S) + dist.get_rank()) % 12
    next_token_loss(wrapped(ids), ids).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_gradients_reach_the_hooks_that_wait_for_them(two: World) -> None:
    plain, again = (two.run(wrapped_body, how) for how in RIGHT)
    assert same(plain[0], again[0])
    assert same(again[0], again[1])


def unusual_body(how: str, frozen: bool, backwards: int) -> dict[str, Tensor]:
    """Gradients where nothing before the blocks is trained, nor one weight in them; and of a graph that is kept."""
    model, ids = built(), torch.arange(B * S).view(B, S) % 12
    for p in (model.tok_embed.weight, model.pos_embed.weight, model.blocks[0].ln1.weight):
        p.requires_grad_(not frozen)
    RIGHT[how](model)
    loss = next_token_loss(model(ids), ids)
    for _ in range(backwards):
        loss.backward(retain_graph=backwards > 1)
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("backwards", [1, 2])
@pytest.mark.parametrize("frozen", [False, True], ids=["all trained", "frozen"])
def test_frozen_weights_and_a_kept_graph_change_nothing(one: World, frozen: bool, backwards: int) -> None:
    assert same(*(one.run(unusual_body, how, frozen, backwards)[0] for how in RIGHT))


def test_without_gradients_a_block_runs_as_it_is() -> None:
    model, ids = recompute_blocks(built(dropout=0.0)), torch.zeros(1, S, dtype=torch.int64)
    with torch.no_grad():
        assert torch.equal(model(ids), built(dropout=0.0)(ids))
    assert not model(ids).detach().requires_grad


def autocast_body(how: str) -> dict[str, Tensor]:
    """Gradients of a forward under autocast; backward is outside of it, as it should be."""
    model, ids = built(dropout=0.0), torch.arange(B * S).view(B, S) % 12
    RIGHT[how](model)
    with torch.autocast("cpu", torch.bfloat16):
        loss = next_token_loss(model(ids), ids)
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_autocast_is_that_of_the_first_forward(one: World) -> None:
    assert same(*(one.run(autocast_body, how)[0] for how in RIGHT))


def test_names_and_state_stay_what_they_were() -> None:
    assert list(recompute_blocks(built()).state_dict()) == list(built().state_dict())
