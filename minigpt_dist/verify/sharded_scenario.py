"""Models, batches and steps of the judge's choice for a fully sharded wrapper.

Owns the scenarios and the small decoder that they run. What a wrapper is told is a module of `nn.Embedding`, `nn.Linear` and a norm,
called in the usual way; what differs is sizes, ties, frozen and unused parts, a layer used twice, biases. Imported by the ranks: no
expected value is here.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LR = 0.5


class Scale(nn.Module):
    """RMS norm (Zhang and Sennrich 2019) with one weight a channel: a small parameter, worth no cut."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, dim))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * self.weight


class Layer(nn.Module):
    """x + down(gelu(up(norm(x))))."""

    def __init__(self, dim: int, hidden: int, bias: bool) -> None:
        super().__init__()
        self.norm = Scale(dim)
        self.up = nn.Linear(dim, hidden, bias=bias)
        self.down = nn.Linear(hidden, dim, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return out


@dataclass(frozen=True)
class ShardScenario:
    """What is asked of a wrapper: a decoder of these sizes, with these peculiarities, over `steps` updates of SGD.

    spare: a layer that nothing uses. rests: a step at which, on all ranks, the last layer is left out. twice: the first layer is applied
    two times in a forward. backwards: forward and backward this often before an update; once: with one finish call after the last of them.
    frozen: the first layer's `up` takes no gradient. decay: the updates' weight decay, which two parameters in one memory would get twice.
    """

    name: str
    why: str
    vocab: int = 24
    dim: int = 12
    hidden: int = 24
    layers: int = 2
    tied: bool = False
    bias: bool = False
    spare: bool = False
    rests: int = 0
    twice: bool = False
    frozen: bool = False
    backwards: int = 1
    once: bool = False
    decay: float = 0.0
    steps: int = 3
    seed: int = field(default=7, compare=False)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


class Decoder(nn.Module):
    """The scenario's model: ids (B, S) to logits (B, S, vocab). While `resting`, the last layer is left out."""

    def __init__(self, s: ShardScenario) -> None:
        super().__init__()
        self.twice, self.resting = s.twice, False
        self.embed = nn.Embedding(s.vocab, s.dim)
        self.blocks = nn.ModuleList(Layer(s.dim, s.hidden, s.bias) for _ in range(s.layers))
        self.spare = nn.Linear(s.dim, s.hidden, bias=False) if s.spare else None
        self.norm = Scale(s.dim)
        self.head = nn.Linear(s.dim, s.vocab, bias=False)
        if s.tied:
            self.head.weight = self.embed.weight
        if s.frozen:
            self.blocks[0].get_submodule("up").requires_grad_(False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        layers = list(self.blocks)[: -1 if self.resting else None]
        for layer in (layers[0], *layers) if self.twice else layers:
            x = layer(x)
        out: Tensor = self.head(self.norm(x))
        return out


def seeded(s: ShardScenario, seed: int) -> Decoder:
    """The decoder whose parameters `seed` decides."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Decoder(s)


def batch_of(s: ShardScenario, step: int, rank: int, part: int) -> tuple[Tensor, Tensor]:
    """Ids and targets, each (2, vocab), of one backward: every token occurs, so that every row of the embedding has a gradient."""
    g = torch.Generator().manual_seed(((s.seed * 101 + step) * 101 + rank) * 101 + part)
    ids = torch.stack([torch.randperm(s.vocab, generator=g) for _ in range(2)])
    return ids, torch.randint(s.vocab, ids.shape, generator=g)


def loss_of(model: Any, s: ShardScenario, step: int, rank: int, part: int) -> Tensor:
    """The mean cross-entropy of one batch, over the number of backwards of an update."""
    ids, targets = batch_of(s, step, rank, part)
    logits: Tensor = model(ids)
    return F.cross_entropy(logits.reshape(targets.numel(), -1), targets.flatten()) / s.backwards


SCENARIOS = (
    ShardScenario("update", "the mean gradient reaches every shard: SGD moves all parameters as one process does"),
    ShardScenario("uneven", "sizes that no number of ranks divides: no row is lost", vocab=37, dim=13, hidden=31),
    ShardScenario("few_rows", "layers with fewer rows than ranks", vocab=24, dim=12, hidden=1),
    ShardScenario("tied", "a weight that two layers share stays one weight", tied=True, decay=0.25),
    ShardScenario(
        "unused", "a layer that nothing uses, and one that rests at a step, neither move nor hang", spare=True, rests=2
    ),
    ShardScenario("frozen", "a frozen layer stays as it is, and gradients pass through it", frozen=True),
    ShardScenario("twice", "a layer used twice in a forward gets both its gradients", twice=True),
    ShardScenario("accumulated", "two backwards before an update add up", backwards=2),
    ShardScenario("biases", "layers with a bias use it, and it learns", bias=True),
)
ONCE = ShardScenario("accumulated_once", "two backwards, and then one finish call", backwards=2, once=True)
BY_NAME = {s.name: s for s in (*SCENARIOS, ONCE)}
DEEP = ShardScenario("deep", "many layers: what is gathered at once is a small part of all", layers=20, steps=2)
