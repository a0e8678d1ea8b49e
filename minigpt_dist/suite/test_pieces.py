"""Pieces that are judged where they are asked for by name: each keeps the promises of its own kind."""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.mark.checks("collectives")
def test_collectives_add_copy_and_send_what_they_promise(check: Callable[[], bool]) -> None:
    assert check()


@pytest.mark.checks("pipeline")
def test_schedules_are_legal_end_and_cost_what_they_should(check: Callable[[], bool]) -> None:
    assert check()


@pytest.mark.checks("guard")
def test_the_guard_gives_all_ranks_one_right_answer(check: Callable[[], bool]) -> None:
    assert check()


@pytest.mark.checks("tensor", "sequence", "clipping")
def test_layers_cut_over_ranks_are_the_whole_layers(check: Callable[[], bool]) -> None:
    assert check()


@pytest.mark.checks("zero2", "zero3")
def test_sharded_gradients_and_parameters_train_as_one_process_in_their_share_of_memory(
    check: Callable[[], bool],
) -> None:
    assert check()


@pytest.mark.checks("recompute")
def test_recomputed_activations_change_no_bit_and_keep_less(check: Callable[[], bool]) -> None:
    assert check()


@pytest.mark.checks("precision")
def test_16_bit_parameters_follow_a_master_copy_under_a_scale_that_all_ranks_share(check: Callable[[], bool]) -> None:
    assert check()
