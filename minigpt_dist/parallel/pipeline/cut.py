"""Cutting a model into stages: any cut of its list of layers, even or balanced by cost."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from minigpt_dist.model import MiniGPT


class Embedding(nn.Module):
    """MiniGPT's first layer, made of the model's own modules: ids (B, S) to (B, S, E)."""

    def __init__(self, model: MiniGPT) -> None:
        super().__init__()
        self.tok_embed, self.pos_embed = model.tok_embed, model.pos_embed

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.tok_embed(ids) + self.pos_embed(torch.arange(ids.shape[1], device=ids.device))
        return out


class Head(nn.Module):
    """MiniGPT's last layer, made of the model's own modules: (B, S, E) to logits (B, S, vocab)."""

    def __init__(self, model: MiniGPT) -> None:
        super().__init__()
        self.ln_f, self.head = model.ln_f, model.head

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.ln_f(x))
        return out


def layers_of(model: MiniGPT) -> list[nn.Module]:
    """Embedding, every block, head: run one after the other they are the model, and share its parameters."""
    return [Embedding(model), *model.blocks, Head(model)]


def even_cuts(layers: int, stages: int) -> list[int]:
    """stages+1 cuts, the larger stages first. ValueError for more stages than layers: none may be empty, and none is dropped."""
    if not 1 <= stages <= layers:
        raise ValueError(f"stages are {stages}, but should be 1 to {layers}, the number of layers")
    base, more = divmod(layers, stages)
    return [s * base + min(s, more) for s in range(stages + 1)]


def balanced_cuts(costs: Sequence[float], stages: int) -> list[int]:
    """stages+1 cuts that make the most expensive stage as cheap as possible; costs, one a layer, in any unit.

    Dynamic programming over (layers taken, stages used).
    """
    even_cuts(len(costs), stages)  # refuses impossible numbers
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    best = {(i, 1): (sums[i], 0) for i in range(1, len(costs) + 1)}
    for s in range(2, stages + 1):
        for i in range(s, len(costs) + 1):
            best[i, s] = min((max(best[j, s - 1][0], sums[i] - sums[j]), j) for j in range(s - 1, i))
    cuts = [len(costs)]
    for s in range(stages, 0, -1):
        cuts.append(best[cuts[-1], s][1])
    return cuts[::-1]


def measured_costs(layers: Sequence[nn.Module], inputs: Tensor, repeats: int = 5) -> list[float]:
    """CPU seconds of forward and backward of each layer on `inputs`, the least of `repeats`: a figure for `balanced_cuts`.

    CPU seconds of this thread: waiting for a core that others use is no cost of a layer.
    """
    least = [float("inf")] * len(layers)
    for _ in range(repeats):
        x = inputs
        for i, layer in enumerate(layers):
            x = x.detach().requires_grad_(x.is_floating_point())
            began = time.thread_time()
            out = layer(x)
            out.backward(torch.ones_like(out))
            least[i] = min(least[i], time.thread_time() - began)
            x = out
    for layer in layers:
        layer.zero_grad()
    return least
