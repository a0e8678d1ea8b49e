"""Tensor parallelism: the unsharded model's loss, gradients and start, from parts of it; and what looks like that but is not."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tensor_cases import ODD, VOCAB, batch, plain_model
from torch import Tensor
from torch.nn import functional as F

from minigpt_dist.cut import Cut
from minigpt_dist.launch import World, run_world
from minigpt_dist.loss import next_token_loss
from minigpt_dist.parallel.tensor import TensorAxis, operators, tensor_parallel, token_loss, whole
from minigpt_dist.parallel.tensor import whole_gradients as gradients_of
from minigpt_dist.parallel.tensor.linear import RowParallelLinear
from minigpt_dist.parallel.tensor.vocabulary import VocabSlice

LOSS, GRADIENT = 1e-13, 1e-11  # of float64, between reduction orders
Answer = tuple[float, dict[str, Tensor]]


@pytest.fixture(scope="module", params=[1, 2, 4])
def ranks(request: pytest.FixtureRequest) -> Iterator[World]:
    with World(request.param, deadline_s=60) as live:
        yield live


@pytest.fixture(scope="module")
def two() -> Iterator[World]:
    with World(2, deadline_s=60) as live:
        yield live


@functools.cache
def one_process(vocab: int, tied: bool, heads: int = 4) -> Answer:
    model = plain_model(0, vocab, tied, num_heads=heads)
    ids, targets = batch(vocab)
    loss = next_token_loss(model(ids), targets)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def answer_body(vocab: int, tied: bool, sequence: bool, wrong: str = "", heads: int = 4) -> Answer:
    """Loss and whole gradients of the cut model; the ranks' models differ before it is cut."""
    with WRONG[wrong]() if wrong else contextlib.nullcontext():
        model = plain_model(dist.get_rank(), vocab, tied, num_heads=heads)
        model = tensor_parallel(model, sequence_parallel=sequence)
        ids, targets = batch(vocab, seed=dist.get_rank() if wrong == "every rank reads its own batch" else 0)
        loss = token_loss(model, model(ids), targets)
        loss.backward()
        return loss.item(), gradients_of(model)


def agrees(seen: Answer, wanted: Answer) -> bool:
    """Equal names, and equal numbers within float64's bounds."""
    near = all(bool((seen[1][n] - g).abs().max() <= GRADIENT) for n, g in wanted[1].items() if n in seen[1])
    return seen[1].keys() == wanted[1].keys() and near and abs(seen[0] - wanted[0]) <= LOSS


@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
@pytest.mark.parametrize("vocab, tied", [(VOCAB, False), (VOCAB, True), (5, True)])
def test_loss_and_gradients_are_the_unsharded_models(ranks: World, vocab: int, tied: bool, sequence: bool) -> None:
    answers = ranks.run(answer_body, vocab, tied, sequence)
    assert all(agrees(answer, one_process(vocab, tied)) for answer in answers)
    assert all(torch.equal(g, answers[0][1][n]) for answer in answers for n, g in answer[1].items())


@pytest.mark.slow  # eight ranks of a few heads each
@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
def test_eight_ranks_hold_a_head_each(sequence: bool) -> None:
    answers = run_world(answer_body, 8, VOCAB, True, sequence, "", 8, deadline_s=60)
    assert all(agrees(answer, one_process(VOCAB, True, heads=8)) for answer in answers)


def bias_in_every_addend() -> Any:
    def forward(self: RowParallelLinear, x: Tensor) -> Tensor:
        return self.axis.leave(F.linear(x, self.weight, self.bias))

    return mock.patch.object(RowParallelLinear, "forward", forward)


def mask_with(low: int, high: int) -> Callable[[], Any]:
    def owns(self: VocabSlice, ids: Tensor) -> Tensor:
        return (ids >= self.lo + low) & (ids < self.hi + high)

    return lambda: mock.patch.object(VocabSlice, "owns", owns)


def replicated_as(summed: int) -> Callable[[], Any]:
    """LayerNorms' gradients, with the sequence cut, summed over ranks that many times."""

    def replicated(self: TensorAxis, *params: Tensor) -> tuple[Tensor, ...]:
        for _ in range(summed if self.sequence_parallel else 0):
            params = tuple(operators.copy_to_region(p, self.group) for p in params)
        return params

    return lambda: mock.patch.object(TensorAxis, "replicated", replicated)


def padding_takes_part() -> Any:
    """Logits of the padding, which are 0, are in the sum of exponentials."""
    init = VocabSlice.__init__

    def padded(self: VocabSlice, vocab: int, axis: TensorAxis) -> None:
        init(self, vocab, axis)
        self.hi = self.lo + self.rows

    return mock.patch.object(VocabSlice, "__init__", padded)


def fused_weight_cut_in_one_piece() -> Any:
    part = Cut.part
    return mock.patch.object(Cut, "part", lambda self, whole, *place: part(Cut(self.dim, self.length), whole, *place))


def every_rank_starts_with_the_first_part() -> Any:
    part = Cut.part
    return mock.patch.object(Cut, "part", lambda self, whole, parts, index: part(self, whole, parts, 0))


def enter_without_sum() -> Any:
    """The input's gradient is this rank's share alone."""
    return mock.patch.object(TensorAxis, "enter", lambda self, x: x)


def leave_twice_summed() -> Any:
    """The sum's gradient is summed once more on its way back, as a plain all-reduce's is."""
    return mock.patch.object(
        TensorAxis,
        "leave",
        lambda self, part: operators.copy_to_region(operators.reduce_from_region(part, self.group), self.group),
    )


def gradient_of_the_sequence_not_summed() -> Any:
    """Entering, the sequence is gathered, but its gradient is cut rather than summed and cut."""
    return mock.patch.object(TensorAxis, "enter", lambda self, x: operators.gather_from_region(x, 1, self.group))


WRONG: dict[str, Callable[[], Any]] = {
    "the bias is added by every rank": bias_in_every_addend,
    "the mask lacks a shard's first token": mask_with(1, 0),
    "the mask lacks a shard's last token": mask_with(0, -1),
    "padding gets probability": padding_takes_part,
    "query, key and value are cut in one piece": fused_weight_cut_in_one_piece,
    "every rank starts with the same part": every_rank_starts_with_the_first_part,
    "the input's gradient is not summed": enter_without_sum,
    "the sum's gradient is summed again": leave_twice_summed,
    "every rank reads its own batch": contextlib.nullcontext,
    "LayerNorm's gradient is not summed": replicated_as(0),
    "LayerNorm's gradient is summed twice": replicated_as(2),
    "the gathered sequence's gradient is not summed": gradient_of_the_sequence_not_summed,
}
NEEDS_SEQUENCE = {name for name in WRONG if "LayerNorm" in name or "sequence" in name}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_version_is_told_from_the_unsharded_model(two: World, wrong: str) -> None:
    answers = two.run(answer_body, ODD, False, wrong in NEEDS_SEQUENCE, wrong)
    assert not all(agrees(answer, one_process(ODD, False)) for answer in answers)


def start_body() -> tuple[list[str], dict[str, Tensor]]:
    model = tensor_parallel(plain_model(dist.get_rank(), VOCAB, False))
    return [name for name, _ in model.named_parameters()], dict(whole(model))


def test_the_start_is_the_first_ranks_whole_model_under_its_names(ranks: World) -> None:
    wanted = dict(plain_model(0, VOCAB, False).named_parameters())
    for names, held in ranks.run(start_body):
        assert names == list(wanted)
        assert all(torch.equal(held[name], p) for name, p in wanted.items())
