"""Data-parallel training step by step: our wrapper beside torch's, and both beside one process on the whole batch.

Owns the run. Plain SGD moves all three, so that a difference is one of gradients: Adam would make a rounding of a small gradient large.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import parallel

from minigpt_dist.batches import read_batch
from minigpt_dist.config import TrainConfig
from minigpt_dist.corpus import make_corpus
from minigpt_dist.launch import run_world
from minigpt_dist.loss import next_token_loss
from minigpt_dist.model import MiniGPT
from minigpt_dist.parallel.collectives import all_reduce_sum, world
from minigpt_dist.parallel.data_parallel import DistributedDataParallel

LR = 0.5
# Of the largest difference of a parameter: sums of N terms in another order, over the steps of a run; six digits of float32 are seen.
BOUNDS = {"float32": 1e-5, "float64": 1e-13}
Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Row:
    """One step: mean losses before it, and after it the largest difference of a parameter."""

    step: int
    ours: float
    torchs: float
    one_process: float
    from_one_process: float
    from_torchs: float


def _step(model: nn.Module, batches: list[Pair]) -> float:
    """SGD on the mean gradient of `batches`; the mean loss."""
    model.zero_grad()
    losses = []
    for x, y in batches:
        loss = next_token_loss(model(x), y)
        (loss / len(batches)).backward()
        losses.append(loss.item())
    with torch.no_grad():
        for p in (p for p in model.parameters() if p.grad is not None):
            p.sub_(p.grad, alpha=LR)  # type: ignore[arg-type]  # not None, as was just asked
    return sum(losses) / len(losses)


def _apart(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)


def agreement_body(config: dict[str, Any], bucket_mb: float) -> list[list[float]]:
    """On each rank: ours, torch's and one process, from the same weights; a row a step."""
    settings, (N, rank) = TrainConfig.from_dict(config), world()
    corpus = make_corpus(settings.seed, settings.total_tokens, settings.model.vocab)

    def built(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return MiniGPT(**asdict(settings.model)).to(getattr(torch, settings.dtype))

    # Only rank 0 starts from the weights that count: the wrappers must copy them.
    wraps: list[Callable[[nn.Module], nn.Module]] = [
        lambda module: DistributedDataParallel(module, bucket_mb=bucket_mb),
        lambda module: parallel.DistributedDataParallel(module, bucket_cap_mb=bucket_mb),
    ]
    ours, torchs = (wrap(built(rank)) for wrap in wraps)
    alone, rows = built(0), []
    for step in range(settings.steps):
        whole = [read_batch(corpus, settings, step, r, 0) for r in range(N)]
        told = torch.tensor([_step(model, [whole[rank]]) for model in (ours, torchs)], dtype=torch.float64)
        means = (all_reduce_sum(told) / N).tolist()
        rows.append([*means, _step(alone, whole), _apart(ours, alone), _apart(ours, torchs)])
    return rows


def compare(world_size: int, steps: int, dtype: str, bucket_mb: float, deadline_s: float) -> list[Row]:
    """The largest differences over ranks, a row a step."""
    config = TrainConfig(world_size=world_size, steps=steps, checkpoint_step=0, dtype=dtype)
    ranks = run_world(agreement_body, world_size, config.to_dict(), bucket_mb, deadline_s=deadline_s)
    found = []
    for step, rows in enumerate(zip(*ranks, strict=True), start=1):
        ours, torchs, alone = rows[0][:3]
        found.append(Row(step, ours, torchs, alone, max(row[3] for row in rows), max(row[4] for row in rows)))
    return found
