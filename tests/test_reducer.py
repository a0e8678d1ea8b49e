"""The reducer in one process: which buckets leave when, in what order, once each, how many at a time, and what a failure leaves behind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from minigpt_dist import ZeroOptimizer
from minigpt_dist.parallel.stages import reducer

SIZES = (2, 2, 3, 1)  # elements of four bytes


class Messages:
    """Stands for the exchange of one rank: notes what is sent, and how many have not been waited for."""

    def __init__(self) -> None:
        self.sent: list[list[float]] = []
        self.under_way = self.most = 0

    def start(self, flat: Tensor, cuts: Sequence[int], group: object) -> Callable[[], Tensor]:
        self.sent.append(flat.tolist())
        self.under_way += 1
        self.most = max(self.most, self.under_way)

        def finish() -> Tensor:
            self.under_way -= 1
            return flat.clone()

        return finish


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> Messages:
    noted = Messages()
    monkeypatch.setattr(reducer, "reduce_scatter_start", noted.start)
    return noted


def made(bucket_bytes: int, **options: Any) -> tuple[list[nn.Parameter], ZeroOptimizer]:
    params = [nn.Parameter(torch.ones(n)) for n in SIZES]
    return params, ZeroOptimizer(params, 1, 0, lr=0.1, stage=2, bucket_mb=bucket_bytes / 2**20, **options)


def backward(params: Sequence[nn.Parameter], used: Sequence[int] = (0, 1, 2, 3), fail: bool = False) -> None:
    """Gradients of i + 1 for parameter i of those that are used."""
    last = [_Fails.apply(params[0]).sum()] if fail else []  # what is built first comes last in backward
    sum([*last, *(((i + 1.0) * params[i]).sum() for i in used)]).backward()


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        raise ZeroDivisionError


@pytest.mark.parametrize(
    ("bucket_bytes", "lengths"),
    [(1, [1, 3, 2, 2]), (15, [1, 3, 2, 2]), (16, [4, 4]), (20, [4, 4]), (24, [6, 2]), (32, [8]), (100, [8])],
)
def test_buckets_are_filled_from_the_last_parameter_on_and_leave_in_that_order(
    messages: Messages, bucket_bytes: int, lengths: list[int]
) -> None:
    params, zero = made(bucket_bytes)
    backward(params)
    assert [len(sent) for sent in messages.sent] == lengths
    assert [x for sent in reversed(messages.sent) for x in sent] == [1, 1, 2, 2, 3, 3, 3, 4]
    assert (messages.under_way, messages.most) == (0, 1)
    zero.step()
    assert len(messages.sent) == len(lengths)


def test_the_first_backward_sends_what_nobody_used_too_as_minus_zero(messages: Messages) -> None:
    params, zero = made(1)
    backward(params, used=(0, 3))
    assert [str(sent[0]) for sent in messages.sent] == ["4.0", "-0.0", "-0.0", "1.0"]
    assert [p.grad for p in params] == [None] * 4
    assert (messages.under_way, messages.most) == (0, 1)
    zero.step()
    assert [shard.steps for shard in zero.shards] == [[1, 0, 0, 1]]


def test_a_gradient_of_minus_zero_is_sent_as_zero(messages: Messages) -> None:
    params, _ = made(1)
    (params[3] * -0.0).sum().backward()
    assert str(messages.sent[0][0]) == "0.0"


def test_what_no_backward_has_sent_leaves_once_at_the_step(messages: Messages) -> None:
    params, zero = made(16)
    for p in params:
        p.grad = torch.full_like(p, 5.0)
    zero.step()
    assert messages.sent == [[5.0] * 4] * 2
    assert [p.grad for p in params] == [None] * 4
    assert zero.shards[0].exp_avg.tolist() == pytest.approx([0.5] * 8)


def test_gradients_kept_back_leave_with_the_next_backwards(messages: Messages) -> None:
    params, zero = made(16)
    with zero.no_sync():
        backward(params)
    assert messages.sent == []
    backward(params, used=(1, 2))
    assert messages.sent == [[6, 6, 6, 4], [1, 1, 4, 4]]


def test_gradients_kept_back_are_forgotten_too(messages: Messages) -> None:
    params, zero = made(16)
    with zero.no_sync():
        backward(params)
    zero.zero_grad()
    backward(params, used=(1, 2))
    assert messages.sent == [[3, 3, 3, -0.0], [-0.0, -0.0, 2, 2]]


def test_each_backward_outside_is_an_exchange_of_its_own_and_sums_up(messages: Messages) -> None:
    params, zero = made(16)
    for _ in range(2):
        backward(params)
    assert len(messages.sent) == 4
    assert [g.tolist() for g in zero.gradients()] == [[2, 2, 4, 4, 6, 6, 6, 8]]


def test_after_a_backward_that_failed_nothing_is_under_way_and_training_goes_on(messages: Messages) -> None:
    params, zero = made(1)
    with pytest.raises(ZeroDivisionError):
        backward(params, used=(1, 2, 3), fail=True)
    assert (messages.sent, messages.under_way) == ([[4], [3, 3, 3], [2, 2]], 1)
    zero.zero_grad()
    assert messages.under_way == 0
    assert [p.grad for p in params] == [None] * 4
    messages.sent.clear()
    backward(params)
    assert messages.sent == [[4], [3, 3, 3], [2, 2], [1, 1]]
    assert [g.tolist() for g in zero.gradients()] == [[1, 1, 2, 2, 3, 3, 3, 4]]


def test_an_exact_sum_is_sent_in_64_bits_from_the_grid(messages: Messages) -> None:
    params, zero = made(100, reduction="exact")
    (params[3] * (1 + 2.0**-23)).sum().backward()
    assert [g.dtype for g in zero.gradients()] == [torch.float64]
    assert zero.gradients()[0][-1] == 1 + 2.0**-23
