"""The grid of exact sums: its spacing, its range, and that sums on it do not depend on order."""

from __future__ import annotations

import pytest
import torch

from minigpt_dist.parallel.exact import MAX_ADDENDS, snap

SPACING = 2.0**-36


def test_values_are_rounded_to_multiples_of_2_to_the_minus_36() -> None:
    near = torch.tensor([3.4, 3.6, -7.4, 0.4, 0.5, 1.5], dtype=torch.float64) * SPACING
    assert (snap(near) / SPACING).tolist() == [3, 4, -7, 0, 0, 2]  # halves to even
    assert snap(torch.tensor([1 / 3], dtype=torch.float64)).item() == round(2**36 / 3) * SPACING


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_result_is_a_new_float64_tensor(dtype: torch.dtype) -> None:
    grad = torch.full((3,), 1 / 3, dtype=dtype)
    snapped = snap(grad)
    assert snapped.dtype is torch.float64
    assert torch.equal(grad, torch.full((3,), 1 / 3, dtype=dtype))


def test_what_is_512_or_more_becomes_infinite_and_nan_stays() -> None:
    values = torch.tensor([512.0, -512.0, 1e30, -1e30, float("nan"), 511.5, -511.5, 1.0])
    assert [str(v) for v in snap(values).tolist()] == ["inf", "-inf", "inf", "-inf", "nan", "511.5", "-511.5", "1.0"]


def test_256_addends_just_below_512_sum_without_rounding_in_every_order() -> None:
    assert MAX_ADDENDS == 256
    largest = snap(torch.tensor([512.0], dtype=torch.float64) - SPACING)
    total = torch.zeros(1, dtype=torch.float64)
    for i in range(256):
        total += largest
        assert total.item() == (i + 1) * (512 * 2**36 - 1) * SPACING
    values = snap(torch.randn(256, 1000, generator=torch.Generator().manual_seed(0)) * 64)
    forward, backward = values[0].clone(), values[-1].clone()
    for i in range(1, 256):
        forward += values[i]
        backward += values[-1 - i]
    assert torch.equal(forward, backward)
