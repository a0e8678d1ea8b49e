"""Stage 3's units in one process: which gathers a forward and a backward start, and what stays whole after them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from minigpt_dist import ZeroOptimizer
from minigpt_dist.parallel.stages import stage3


@pytest.fixture
def gathers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Elements of each gather, in the order in which they are started."""
    started: list[int] = []

    def start(full: Tensor, cuts: Sequence[int], group: object) -> Callable[[], None]:
        started.append(full.numel())
        return lambda: None

    monkeypatch.setattr(stage3, "all_gather_start", start)
    return started


class Idle(nn.Linear):
    """A layer with a parameter that it does not use."""

    def __init__(self, size: int) -> None:
        super().__init__(size, size)
        self.idle = nn.Parameter(torch.ones(1))


class Chosen(nn.Module):
    """A unit of two layers (two and six elements), one in a container (twelve), of which each forward runs those asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(1, 1), nn.Linear(2, 2)
        self.more = nn.ModuleList([nn.Linear(3, 3)])

    def forward(self, which: str) -> Tensor:
        parts = {"a": (self.a, 1), "b": (self.b, 2), "m": (self.more[0], 3)}
        return torch.stack([parts[name][0](torch.ones(1, parts[name][1])).sum() for name in which]).sum()


def freed(model: nn.Module) -> bool:
    return all(bool(p.isnan().all()) for p in model.parameters())


def test_after_each_backward_all_is_freed_though_a_parameter_had_no_gradient() -> None:
    model = nn.Sequential(Idle(2), nn.Linear(2, 2))
    ZeroOptimizer(model, 1, 0, stage=3)
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
        assert freed(model)


def test_a_unit_is_gathered_once_a_forward_whatever_the_last_one_left_out(gathers: list[int]) -> None:
    """The first forward gathers ahead in the order of declaration."""
    model = Chosen()
    ZeroOptimizer(model, 1, 0, stage=3)
    for which, wanted in (("b", [8, 12]), ("b", [8]), ("ab", [8]), ("a", [8]), ("ab", [8])):
        gathers.clear()
        with torch.no_grad():
            model(which)
        assert (gathers, freed(model)) == (wanted, True)


def test_what_comes_next_is_gathered_ahead_only_where_the_last_forward_used_it(gathers: list[int]) -> None:
    model = Chosen()
    ZeroOptimizer(model, 1, 0, stage=3)
    for which, wanted in (("ab", [8, 12]), ("ab", [8]), ("m", [12]), ("abm", [8, 12]), ("abm", [8, 12]), ("m", [12])):
        gathers.clear()
        with torch.no_grad():
            model(which)
        assert (gathers, freed(model)) == (wanted, True)


def test_forwards_last_unit_stays_whole_for_its_backward_and_others_come_again(gathers: list[int]) -> None:
    model = Chosen()
    ZeroOptimizer(model, 1, 0, stage=3)
    loss = model("abm")
    gathers.clear()
    loss.backward()
    assert (gathers, freed(model)) == ([8], True)


def test_inside_of_gathered_nothing_is_freed_by_use(gathers: list[int]) -> None:
    model = Chosen()
    zero = ZeroOptimizer(model, 1, 0, stage=3)
    with zero.gathered():
        model("abm").backward()
        with zero.gathered():
            assert not any(bool(p.isnan().any()) for p in model.parameters())
        assert not any(bool(p.isnan().any()) for p in model.parameters())
    assert (gathers, freed(model)) == ([8, 12], True)
