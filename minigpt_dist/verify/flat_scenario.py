"""A scenario as flat vectors: its trainable parameters and every rank's gradients, laid end to end and cut evenly over the ranks.

Owns the layout that a diagnosis looks at. Leaves what is done with the gradients to `wrong_adam.py`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minigpt_dist.verify.gradients import initial_value, rank_gradient
from minigpt_dist.verify.scenario import Scenario

Flat = Sequence[Sequence[Tensor]]  # [rank][step]: parameters as one vector (P,)
MOST = 2000  # elements that a diagnosis looks at


@dataclass(frozen=True, eq=False)
class Layout:
    """The trainable parameters of a scenario as one vector of P elements, laid out in declaration order and cut evenly over N ranks.

    Of a large scenario only a sample is looked at, evenly spread: P then counts its elements. places: where they are in the whole.
    tensor: which tensor each belongs to. owner: the rank whose slice holds it. start: values before training.
    """

    scenario: Scenario
    world_size: int
    tensors: tuple[int, ...]
    places: Tensor
    tensor: Tensor
    owner: Tensor
    start: Tensor

    @property
    def numel(self) -> int:
        return self.tensor.numel()

    @property
    def chunk(self) -> int:
        """Elements a rank owns, the last one's padding included."""
        return -(-self.numel // self.world_size)

    def flatten(self, values: Sequence[Tensor]) -> Tensor:
        """The trainable ones of `values`, which holds every tensor of the scenario, as one float64 vector."""
        return _joined([values[i].detach() for i in self.tensors])[self.places]

    def option(self, name: str, base: float) -> Tensor:
        """An option of each element: the scenario's own for some tensors, `base` elsewhere."""
        result = torch.full((self.numel,), base, dtype=torch.float64)
        for tensor, option, value in self.scenario.groups:
            if option == name:
                result[self.tensor == tensor] = base * value if name == "lr" else value
        return result


@functools.lru_cache(maxsize=64)
def layout(s: Scenario, world_size: int) -> Layout:
    """The layout of a scenario; remembered."""
    tensors = tuple(i for i in range(len(s.shapes)) if i not in s.frozen)
    numels = [math.prod(s.shapes[i]) for i in tensors]
    total = sum(numels)
    tensor = torch.repeat_interleave(torch.tensor(tensors, dtype=torch.long), torch.tensor(numels, dtype=torch.long))
    owner = torch.arange(total) // max(-(-total // world_size), 1)
    start = _joined([initial_value(s.seed, i, s.shapes[i]) for i in tensors])
    places = torch.arange(0, total, max(total // MOST, 1))
    return Layout(s, world_size, tensors, places, tensor[places], owner[places], start[places])


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """All elements as one float64 vector."""
    return torch.cat([torch.zeros(0, dtype=torch.float64), *(t.double().reshape(-1) for t in tensors)])


@functools.lru_cache(maxsize=512)
def _local(s: Scenario, world_size: int, step: int, part: int) -> Tensor:
    """(N, P): what backward number `part` of `step` gives on each rank, zeros where a rank gets nothing."""
    rows = []
    for rank in range(world_size):
        off = s.without_gradient(step, rank, world_size)
        row = [
            torch.zeros(s.shapes[i]) if i in off else rank_gradient(s.seed, i, s.shapes[i], step, rank, part)
            for i in layout(s, world_size).tensors
        ]
        rows.append(_joined(row)[layout(s, world_size).places])
    return torch.stack(rows)


@dataclass
class Step:
    """What a mistake may look at: gradients of all ranks at one step. `rank` is who looks; `kept` (N, P) what earlier steps left to add."""

    layout: Layout
    step: int
    rank: int
    kept: Tensor
    earlier: Tensor | None = None

    @property
    def parts(self) -> list[Tensor]:
        """(N, P) of each backward of this step."""
        s = self.layout.scenario
        return [_local(s, self.layout.world_size, self.step, part) for part in range(s.backwards)]

    @property
    def local(self) -> Tensor:
        """(N, P): each rank's own gradient, all backwards added."""
        total = self.kept
        for part in self.parts:
            total = total + part
        return total

    @property
    def mean(self) -> Tensor:
        return self.local.mean(0)

    @property
    def owners(self) -> Tensor:
        """(P,): for each element, the gradient of the rank that owns it."""
        return self.local.gather(0, self.layout.owner.clamp(max=self.layout.world_size - 1)[None])[0]
