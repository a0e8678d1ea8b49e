"""A run of any layout in one process, on the same global batches: the oracle of the matrix of layouts, by plain autograd and AdamW."""

from __future__ import annotations

import functools
import math
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from minigpt_dist.batches import read_batch
from minigpt_dist.config import TrainConfig
from minigpt_dist.corpus import make_corpus
from minigpt_dist.model import MiniGPT
from minigpt_dist.trace import digest


def logits_of(model: MiniGPT, ids: Tensor, streams: int | None) -> Tensor:
    """The model's forward; under a pipeline with dropout, layer i of embedding, blocks and head draws from a stream of its own."""
    x = model.tok_embed(ids) + model.pos_embed(torch.arange(ids.shape[1]))
    for i, block in enumerate(model.blocks, start=1):
        if streams is not None:
            torch.manual_seed(streams * 2**20 + i)
        x = block(x)
    return model.head(model.ln_f(x))  # type: ignore[no-any-return]  # a module's call is Any


def one_process_body(settings: dict[str, Any]) -> dict[str, Any]:
    """The same global batches in one process: gradients added in the order of replicas and micro-batches, torch's AdamW on a master copy.

    By step: mean losses of the replicas, norms of the gradient and of the parameters, digests of the parameters.
    """
    c = TrainConfig.from_dict(settings)
    torch.manual_seed(c.seed * 1009)
    model = MiniGPT(**asdict(c.model)).to(getattr(torch, c.dtype))
    masters = [
        nn.Parameter(p.detach().to(torch.float64 if c.dtype == "float64" else torch.float32))
        for p in model.parameters()
    ]
    adamw = torch.optim.AdamW(masters, c.lr, c.betas, c.eps, c.weight_decay, foreach=False)
    corpus, scale = make_corpus(c.seed, c.total_tokens, c.model.vocab), c.loss_scale if c.dtype == "float16" else 1.0
    losses, norms = [], [math.nan]
    params = [dict(model.named_parameters())]
    digests = [{name: digest(p) for name, p in params[0].items()}]
    for step in range(c.steps):
        of_ranks, now = [], []
        for r in range(c.dp):
            model.zero_grad()
            mine = []
            for m in range(c.micro_batches):
                seed = (c.seed * 1_000_003 + step + 1) * 4099 + r * c.micro_batches + m
                torch.manual_seed(seed)
                x, y = read_batch(corpus, c, step, r, m)
                out = logits_of(model, x, seed if c.pp > 1 and c.model.dropout else None)
                loss = F.cross_entropy(
                    out.flatten(0, 1).float() if out.element_size() == 2 else out.flatten(0, 1), y.flatten()
                )
                (loss * scale / c.micro_batches).backward()
                mine.append(loss.item())
            of_ranks.append(math.fsum(mine) / len(mine))
            now.append([p.grad.to(q.dtype) for p, q in zip(model.parameters(), masters, strict=True)])  # type: ignore[union-attr]  # there
        grads = [functools.reduce(torch.add, each) / c.dp / scale for each in zip(*now, strict=True)]
        losses.append(of_ranks)
        finite = all(bool(g.isfinite().all()) for g in grads)
        norm = math.sqrt(sum(float(torch.linalg.vector_norm(g, dtype=torch.float64)) ** 2 for g in grads))
        norms.append(norm if finite else math.nan)
        if not finite:
            scale = max(scale / 2, 1.0)
        else:
            share = min(c.max_norm / (norm + 1e-6), 1.0) if c.max_norm else 1.0
            for q, g in zip(masters, grads, strict=True):
                q.grad = g * share
            adamw.step()
        with torch.no_grad():
            for p, q in zip(model.parameters(), masters, strict=True):
                p.copy_(q)
        digests.append({name: digest(p) for name, p in model.named_parameters()})
    total = math.sqrt(sum(float(p.detach().double().square().sum()) for p in model.parameters()))
    return {"losses": losses, "norms": norms, "digests": digests, "norm": total}
