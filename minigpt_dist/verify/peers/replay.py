"""One process that reproduces a run bit for bit, from the order in which a stack has gradients added: ours, or a peer.

Owns which vectors each package hands to gloo's ring, and when it divides by the number of ranks. A bit that differs is then a difference
in what was computed, not noise. Leaves the ring itself to `ring_order.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from minigpt_dist.batches import read_batch
from minigpt_dist.config import TrainConfig
from minigpt_dist.corpus import make_corpus
from minigpt_dist.loss import next_token_loss
from minigpt_dist.model import MiniGPT
from minigpt_dist.trace import digest
from minigpt_dist.verify.peers.adamw import adamw_options
from minigpt_dist.verify.ring_order import ring_sum

FIRST_BUCKET = 1 << 20  # bytes that DistributedDataParallel puts into its first bucket


class Replay:
    """A model, its gradients on every rank's block, and the order in which autograd finishes them."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        torch.manual_seed(config.seed * 1009)  # rank 0's
        sizes = {name: getattr(config.model, name) for name in config.model.__dataclass_fields__}
        self.model = MiniGPT(**sizes).to(getattr(torch, config.dtype))
        self.losses: list[float] = []  # of the last step, by rank
        self.named = dict(self.model.named_parameters())
        self.ready: list[str] = []
        for name, p in self.named.items():
            p.register_post_accumulate_grad_hook(lambda _, name=name: self.ready.append(name))

    def gradients(self, step: int, corpus: Tensor) -> list[dict[str, Tensor]]:
        """Per rank, the gradient of its block at `step`, counted from 0."""
        found = []
        self.losses = []
        for rank in range(self.config.world_size):
            self.model.zero_grad()
            self.ready.clear()
            x, y = read_batch(corpus, self.config, step, rank)
            loss = next_token_loss(self.model(x), y)
            loss.backward()
            self.losses.append(loss.item())
            found.append({name: p.grad for name, p in self.named.items() if p.grad is not None})
        return found


def ranks(run: Replay, grads: list[dict[str, Tensor]], step: int) -> dict[str, Tensor]:
    """What one process does that accumulates block after block: the sum in rank order. Divided by N after."""
    return {name: functools.reduce(torch.add, [g[name] for g in grads]) / len(grads) for name in grads[0]}


def _as_one(
    names: Sequence[str], grads: list[dict[str, Tensor]], before: Callable[[Tensor], Tensor]
) -> dict[str, Tensor]:
    """Ring-sum the named gradients as one vector, laid out in the order given; `before` is applied to each rank's."""
    total = ring_sum([before(torch.cat([g[name].reshape(-1) for name in names])) for g in grads])
    parts = total.split([grads[0][name].numel() for name in names])
    return {name: part.view_as(grads[0][name]) for name, part in zip(names, parts, strict=True)}


def buckets(run: Replay, grads: list[dict[str, Tensor]], step: int) -> dict[str, Tensor]:
    """DistributedDataParallel, one bucket: declaration order at the first step, then as autograd finished. Multiplied by 1/N before."""
    size = sum(g.numel() * g.element_size() for g in grads[0].values())
    if size > FIRST_BUCKET:
        raise ValueError(f"gradients are {size} bytes, but should be at most {FIRST_BUCKET}: one bucket")
    names = list(run.named) if step == 0 else list(run.ready)
    share = 1.0 / len(grads)
    return _as_one(names, grads, lambda flat: flat * share)


def units(run: Replay, grads: list[dict[str, Tensor]], step: int) -> dict[str, Tensor]:
    """fully_shard by blocks: a vector for each unit, every parameter cut by rows. Divided by N after."""
    total: dict[str, Tensor] = {}
    for names in _units(list(run.named)):
        total.update(_cut_for_ranks(names, grads, _rows))
    return {name: part / len(grads) for name, part in total.items()}


def _units(names: list[str]) -> list[list[str]]:
    """Each block's parameters, and the others."""
    blocks: dict[str, list[str]] = {}
    for name in names:
        parts = name.split(".")
        blocks.setdefault(parts[1] if parts[0] == "blocks" else "", []).append(name)
    return list(blocks.values())


def _cut_for_ranks(
    names: Sequence[str], grads: list[dict[str, Tensor]], cut: Callable[[Tensor, int], Tensor]
) -> dict[str, Tensor]:
    """Ring-sum one vector of N equal parts, part r holding rank r's share of each named gradient, as `cut` gives it."""
    N = len(grads)
    shares = [[cut(g[name], N) for name in names] for g in grads]
    summed = ring_sum([torch.cat(mine, dim=1).reshape(-1) for mine in shares]).view(N, -1)
    parts = summed.split([share.shape[1] for share in shares[0]], dim=1)
    whole = grads[0]
    return {n: p.reshape(-1)[: whole[n].numel()].view_as(whole[n]) for n, p in zip(names, parts, strict=True)}


def _rows(grad: Tensor, world_size: int) -> Tensor:
    """(N, elements): row r holds the rows of rank r, zeros where there are too few."""
    block = -(-grad.shape[0] // world_size)
    padded = grad.new_zeros(block * world_size, *grad.shape[1:])
    padded[: grad.shape[0]] = grad
    return padded.view(world_size, -1)


def flat(run: Replay, grads: list[dict[str, Tensor]], step: int) -> dict[str, Tensor]:
    """DeepSpeed ZeRO-1: one vector in declaration order. Divided by N before."""
    return _as_one(list(run.named), grads, lambda vector: vector / len(grads))


def reversed_flat(run: Replay, grads: list[dict[str, Tensor]], step: int) -> dict[str, Tensor]:
    """DeepSpeed ZeRO-2: one vector in reversed order. Divided by N before."""
    return _as_one(list(run.named)[::-1], grads, lambda vector: vector / len(grads))


def slices(run: Replay, grads: list[dict[str, Tensor]], step: int) -> dict[str, Tensor]:
    """DeepSpeed ZeRO-3: one vector, every parameter cut by elements. Divided by N before."""
    divided = [{name: g / len(grads) for name, g in mine.items()} for mine in grads]
    return _cut_for_ranks(list(run.named), divided, lambda grad, N: _rows(grad.reshape(-1), N))


ORDERS: dict[str, Callable[[Replay, list[dict[str, Tensor]], int], dict[str, Tensor]]] = {
    "ranks": ranks,
    "buckets": buckets,
    "units": units,
    "flat": flat,
    "reversed": reversed_flat,
    "slices": slices,
}


@dataclass(frozen=True)
class Replayed:
    """losses[step][rank], nats a token, before each update; digests of all parameters after 0, 1, ... updates; and these at the end."""

    losses: list[list[float]]
    digests: list[dict[str, str]]
    final: dict[str, Tensor]


def replay(config: TrainConfig, order: str) -> Replayed:
    """Train as all ranks of `config` together would that add in `order`. ValueError for an unknown order."""
    if order not in ORDERS:
        raise ValueError(f"order is {order!r}, but should be one of {', '.join(ORDERS)}")
    run = Replay(config)
    optimizer = torch.optim.AdamW(run.model.parameters(), **adamw_options(config))
    corpus = make_corpus(config.seed, config.total_tokens, config.model.vocab)
    losses, digests = [], [_digests(run.model)]
    for step in range(config.steps):
        mean = ORDERS[order](run, run.gradients(step, corpus), step)
        for name, p in run.named.items():
            p.grad = mean[name].clone()
        optimizer.step()
        losses.append(run.losses)
        digests.append(_digests(run.model))
    return Replayed(losses, digests, {name: p.detach() for name, p in run.named.items()})


def replay_body(config: dict[str, object], order: str) -> list[dict[str, str]]:
    """On one rank (one thread: bits depend on it): digests of all parameters after 0, 1, ... steps."""
    return replay(TrainConfig.from_dict(config), order).digests


def _digests(model: nn.Module) -> dict[str, str]:
    return {name: digest(p) for name, p in model.named_parameters()}
