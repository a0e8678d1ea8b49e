"""Options of an optimizer in torch's shape are edited where torch's own schedulers edit them, and nowhere else."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from minigpt_dist.verify.optimizers import NotSupportedError, UneditableError, scale_decay, set_lr


class Hidden(torch.optim.Optimizer):
    """An optimizer that shows the groups it is given, and works with others."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        self.param_groups = groups


def test_an_edit_reaches_every_group_and_none_where_an_optimizer_shows_none() -> None:
    groups: list[dict[str, Any]] = [{"lr": 1.0, "weight_decay": 0.5}, {"lr": 2.0, "weight_decay": 0.0}]
    set_lr(Hidden(groups), 0.5)
    scale_decay(Hidden(groups), 4.0)
    set_lr(Hidden([]), 0.5)  # as a scheduler would, in silence: the trajectory shows it
    assert groups == [{"lr": 0.5, "weight_decay": 2.0}, {"lr": 1.0, "weight_decay": 0.0}]


def test_a_group_without_the_option_is_named_and_other_shapes_are_not_asked() -> None:
    with pytest.raises(UneditableError, match="no 'lr' that a scheduler"):
        set_lr(Hidden([{"params": []}]), 0.5)
    with pytest.raises(NotSupportedError):
        set_lr(object(), 0.5)
