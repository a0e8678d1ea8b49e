"""torch.distributed.pipelining over two stages of MiniGPT, against one process that accumulates the same micro-batches.

Owns the cut of the model, the schedules, and both sides' training steps. A stage adds gradients of its micro-batches in the order of a
single process, so the two agree bit for bit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from minigpt_dist.batches import read_batch
from minigpt_dist.config import TrainConfig
from minigpt_dist.corpus import make_corpus
from minigpt_dist.loss import next_token_loss
from minigpt_dist.model import MiniGPT
from minigpt_dist.parallel.collectives import world
from minigpt_dist.trace import digest
from minigpt_dist.verify.peers.adamw import adamw_options

SCHEDULES: dict[str, Any] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
STAGES = 2


class Stage(nn.Module):
    """Stage `index` of `STAGES`: an equal share of the blocks, the embeddings before the first, norm and head after the last.

    Its parameters keep the whole model's names.
    """

    def __init__(self, model: MiniGPT, index: int) -> None:
        super().__init__()
        share = len(model.blocks) // STAGES
        self.blocks = nn.ModuleDict({str(i): model.blocks[i] for i in range(index * share, (index + 1) * share)})
        first, last = index == 0, index == STAGES - 1
        self.tok_embed: nn.Module | None = model.tok_embed if first else None
        self.pos_embed: nn.Module | None = model.pos_embed if first else None
        self.ln_f: nn.Module | None = model.ln_f if last else None
        self.head: nn.Module | None = model.head if last else None

    def forward(self, x: Tensor) -> Tensor:
        """Token ids (B, S), or the stage before's activations (B, S, E), to activations, or logits (B, S, vocab)."""
        if self.tok_embed is not None and self.pos_embed is not None:
            x = self.tok_embed(x) + self.pos_embed(torch.arange(x.shape[1]))
        for block in self.blocks.values():
            x = block(x)
        if self.head is not None and self.ln_f is not None:
            x = self.head(self.ln_f(x))
        return x


def _start(config: dict[str, Any]) -> tuple[TrainConfig, MiniGPT, Tensor]:
    """The run, the same model on every rank, its data."""
    c = TrainConfig.from_dict(config)
    torch.manual_seed(c.seed)
    model = MiniGPT(**{name: getattr(c.model, name) for name in c.model.__dataclass_fields__})
    return c, model, make_corpus(c.seed, c.total_tokens, c.model.vocab)


def pipeline_body(config: dict[str, Any], schedule: str) -> dict[str, Any]:
    """On `STAGES` ranks: train under `schedule`; per step, digests of this stage's parameters, and the losses on the last stage."""
    c, model, corpus = _start(config)
    rank = world()[1]
    stage = Stage(model, rank)
    runner = SCHEDULES[schedule](
        PipelineStage(stage, rank, STAGES, torch.device("cpu")), n_microbatches=c.micro_batches, loss_fn=next_token_loss
    )
    optimizer = torch.optim.AdamW(stage.parameters(), **adamw_options(c))
    steps, losses = [], []
    for step in range(c.steps):
        optimizer.zero_grad()
        batches = [read_batch(corpus, c, step, 0, m) for m in range(c.micro_batches)]
        here: list[Tensor] = []
        if rank == 0:
            runner.step(torch.cat([x for x, _ in batches]))
        else:
            runner.step(target=torch.cat([y for _, y in batches]), losses=here)
        optimizer.step()
        steps.append({name: digest(p) for name, p in stage.named_parameters()})
        losses.append([float(loss) for loss in here])
    return {"steps": steps, "losses": losses}


def accumulation_body(config: dict[str, Any]) -> dict[str, Any]:
    """On one rank: the same training by accumulation, the sum of gradients divided by the number of micro-batches."""
    c, model, corpus = _start(config)
    optimizer = torch.optim.AdamW(model.parameters(), **adamw_options(c))
    steps, losses = [], []
    for step in range(c.steps):
        optimizer.zero_grad()
        here = []
        for m in range(c.micro_batches):
            x, y = read_batch(corpus, c, step, 0, m)
            loss = next_token_loss(model(x), y)
            loss.backward()
            here.append(loss.item())
        for p in model.parameters():
            assert p.grad is not None
            p.grad /= c.micro_batches
        optimizer.step()
        steps.append({name: digest(p) for name, p in model.named_parameters()})
        losses.append(here)
    return {"steps": steps, "losses": losses}
