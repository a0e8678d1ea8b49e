"""A pipeline step, really run: when every action ran on every rank, what was held, and whether it has the bits of one process.

Owns the model and data of the run, and what is taken from it. Leaves the pieces to `parallel/pipeline/`, words and pictures to
`cli/pipeline.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from minigpt_dist.activations import SavedBytes, layer_activations
from minigpt_dist.config import ModelConfig
from minigpt_dist.launch import run_world
from minigpt_dist.loss import next_token_loss
from minigpt_dist.model import MiniGPT
from minigpt_dist.parallel.collectives import barrier, world
from minigpt_dist.parallel.p2p import Peers
from minigpt_dist.parallel.pipeline import Action, Pipeline, Schedule, balanced_cuts, even_cuts, layers_of
from minigpt_dist.parallel.pipeline.cut import measured_costs
from minigpt_dist.parallel.pipeline.schedule import micros_of, stages_of
from minigpt_dist.parallel.pipeline.timeline import Span
from minigpt_dist.trace import digest

CUTS = ("balanced", "even")


@dataclass(frozen=True)
class PipelineRun:
    """What a pipeline showed of its quickest step.

    cuts: the layers where stages begin and end. layer_seconds: CPU seconds of each layer alone, forward and backward: balanced cuts
    are made of them. spans: [rank][position], in seconds of the machine's clock; cpu_seconds: how long each action kept a core busy.
    live: activations held at most, by rank; live_bytes: the bytes that autograd kept, foretold_bytes: those of the formula.
    wrong: what is not equal to one process, bit for bit.
    """

    schedule: Schedule
    cuts: list[int]
    layer_seconds: list[float]
    spans: list[list[Span]]
    cpu_seconds: dict[Action, float]
    live: list[int]
    live_bytes: list[int]
    foretold_bytes: list[int]
    wrong: list[str]


def micro_batches(model: ModelConfig, micros: int, batch: int) -> tuple[list[Tensor], list[Tensor]]:
    """Inputs and targets, each (batch, S) token ids, the same on every rank."""
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, model.vocab, (2, micros, batch, model.seq_len), generator=draw)
    return list(tokens[0]), list(tokens[1])


def built(model: ModelConfig) -> MiniGPT:
    """The model, the same on every rank."""
    torch.manual_seed(0)
    return MiniGPT(**asdict(model))


def one_process_body(sizes: dict[str, Any], micros: int, batch: int) -> dict[str, Any]:
    """On one rank: seconds of each layer, then losses and gradients of the same micro-batches, one after the other."""
    config = ModelConfig(**sizes)
    model, (inputs, targets) = built(config), micro_batches(config, micros, batch)
    seconds = measured_costs(layers_of(model), inputs[0])
    model.zero_grad()
    losses = []
    for x, y in zip(inputs, targets, strict=True):
        loss = next_token_loss(model(x), y)
        (loss / micros).backward()
        losses.append(loss.item())
    gradients = {name: digest(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    return {"seconds": seconds, "losses": losses, "gradients": gradients}


def rank_body(
    sizes: dict[str, Any], rows: list[list[list[Any]]], cuts: list[int], batch: int, steps: int
) -> dict[str, Any]:
    """On each rank: `steps` steps of its stages, after one that warms up."""
    config, schedule, (N, rank) = ModelConfig(**sizes), [[Action(*a) for a in row] for row in rows], world()
    model, (inputs, targets) = built(config), micro_batches(config, micros_of(schedule), batch)
    layers = layers_of(model)
    stages = {s: nn.Sequential(*layers[cuts[s] : cuts[s + 1]]) for s in range(rank, len(cuts) - 1, N)}
    shared = model.get_parameter("tok_embed.weight") if config.tie_head else None
    shape, peers = (batch, config.seq_len, config.embed_dim), Peers()
    pipe = Pipeline(stages, schedule, next_token_loss, shape, torch.float32, peers, shared)
    own = {id(p) for stage in stages.values() for p in stage.parameters()}
    taken = []
    for _ in range(1 + steps):
        model.zero_grad()
        barrier()
        with SavedBytes(model.parameters()) as saved:
            losses = pipe.step(inputs, targets)
        pairs = zip(pipe.spans, pipe.cpu_seconds, strict=True)
        taken.append([[*span.action, span.start, span.end, cpu] for span, cpu in pairs])
    gradients = {n: digest(p.grad) for n, p in model.named_parameters() if id(p) in own and p.grad is not None}
    return {
        "spans": taken[1:],
        "losses": losses,
        "gradients": gradients,
        "live": pipe.peak_live,
        "live_bytes": saved.peak,
    }


def run_pipeline(
    model: ModelConfig, schedule: Schedule, batch: int, steps: int, cut: str, deadline_s: float
) -> PipelineRun:
    """Run `steps` steps of the schedule, a rank for each of its lists, over gloo.

    batch: sequences a micro-batch. cut: "balanced" by the layers' measured seconds, or "even".
    ValueError where there are more stages than layers.
    """
    stages, micros = stages_of(schedule), micros_of(schedule)
    even = even_cuts(model.num_layers + 2, stages)
    (alone,) = run_world(one_process_body, 1, asdict(model), micros, batch, deadline_s=deadline_s)
    cuts = balanced_cuts(alone["seconds"], stages) if cut == "balanced" else even
    rows = [[list(action) for action in row] for row in schedule]
    ranks = run_world(rank_body, len(schedule), asdict(model), rows, cuts, batch, steps, deadline_s=deadline_s)
    shown = min(([rank["spans"][k] for rank in ranks] for k in range(steps)), key=length)
    return PipelineRun(
        schedule,
        cuts,
        alone["seconds"],
        [[Span(Action(*span[:3]), *span[3:5]) for span in row] for row in shown],
        {Action(*span[:3]): span[5] for row in shown for span in row},
        [rank["live"] for rank in ranks],
        [rank["live_bytes"] for rank in ranks],
        [foretold(row, cuts, layer_activations(model, batch, torch.float32)) for row in schedule],
        _wrong(alone, ranks),
    )


def length(rows: Sequence[Sequence[Sequence[Any]]]) -> float:
    """From the first start to the last end of spans as ranks return them."""
    return float(max(span[4] for row in rows for span in row) - min(span[3] for row in rows for span in row))


def foretold(actions: Sequence[Action], cuts: Sequence[int], layers: Sequence[int]) -> int:
    """The most bytes that one rank's actions keep at once, from those of each layer."""
    now = most = 0
    for action in actions:
        kept = sum(layers[cuts[action.stage] : cuts[action.stage + 1]])
        now += kept if action.kind == "F" else -kept
        most = max(most, now)
    return most


def _wrong(alone: dict[str, Any], ranks: list[dict[str, Any]]) -> list[str]:
    """Which losses and gradients differ from those of one process, or are missing."""
    found = [] if [r["losses"] for r in ranks if r["losses"]] == [alone["losses"]] else ["the losses"]
    shown = {name: {r["gradients"][name] for r in ranks if name in r["gradients"]} for name in alone["gradients"]}
    return found + [name for name, digests in shown.items() if digests != {alone["gradients"][name]}]
