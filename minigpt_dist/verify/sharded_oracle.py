"""What a fully sharded wrapper must come to, from one process that holds everything: no shard, no collective, float64.

Owns the expected values of the scenarios, and the bytes that a cut may leave on a rank.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from minigpt_dist.verify.sharded_scenario import LR, Decoder, ShardScenario, loss_of, seeded

WORD = 4  # bytes of a float32


@functools.lru_cache(maxsize=64)
def states_of(s: ShardScenario, seed: int, world_size: int) -> list[dict[str, torch.Tensor]]:
    """Parameters at the start and after each update by plain SGD on the mean of all ranks' gradients, by name, float64."""
    model = seeded(s, seed).double()
    named = dict(model.named_parameters())
    states = [_copies(named)]
    for step in range(1, s.steps + 1):
        model.zero_grad()
        model.resting = step == s.rests
        for rank in range(world_size):
            for part in range(s.backwards):
                (loss_of(model, s, step, rank, part) / world_size).backward()
        with torch.no_grad():
            for p in named.values():
                if p.grad is not None:
                    p.sub_(p.grad + s.decay * p, alpha=LR)
        states.append(_copies(named))
    return states


def _copies(named: dict[str, torch.nn.Parameter]) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in named.items()}


@dataclass(frozen=True)
class Share:
    """Bytes of a scenario's parameters: `whole` all of them, `mine` the most that a rank may keep, `unit` those of one layer."""

    whole: int
    mine: int
    unit: int


def share_of(s: ShardScenario, world_size: int) -> Share:
    """A rank's part when every matrix is cut by rows or as a flat vector, padded, and vectors (norms) may stay whole.

    A vector that holds a hundredth of the elements is not worth a collective; FSDP and courses leave it on every rank.
    """
    shapes = [p.shape for p in Decoder(s).parameters()]
    matrices = [shape for shape in shapes if len(shape) > 1]
    vectors = sum(shape.numel() for shape in shapes if len(shape) == 1)
    cut = sum(-(-shape[0] // world_size) * shape[1:].numel() for shape in matrices)
    whole = sum(shape.numel() for shape in shapes)
    return Share(WORD * whole, WORD * (cut + vectors), WORD * 2 * s.dim * s.hidden)
