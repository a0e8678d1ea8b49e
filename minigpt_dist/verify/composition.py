"""The composed run under judgement: train with a checkpoint, then resume it in fresh processes; beside it, the one-process oracle.

Owns the bodies that ranks run and the evidence they bring. Leaves what it means to `checks/`.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from minigpt_dist.config import TrainConfig
from minigpt_dist.corpus import make_corpus
from minigpt_dist.memory import held
from minigpt_dist.trace import Record, Trace, digest, leaves, merge, tensor_bytes
from minigpt_dist.verify.contract import resolve
from minigpt_dist.verify.optimizers import abilities
from minigpt_dist.verify.plug import build_model, pieces_of
from minigpt_dist.verify.subject import NotJudged, Subject
from minigpt_dist.worker import Worker


def composed_body(spec: str, slots: list[str], config: dict[str, Any], folder: str, resume: bool) -> dict[str, Any]:
    """One rank of the composed run; besides the records, the final parameters as bytes."""
    impl = resolve(spec, tuple(slots))
    worker = Worker(TrainConfig.from_dict(config), Path(folder), pieces_of(impl), resume=resume)
    result = worker.run()
    known = "pieces" in impl.extras  # a peer's, whose traits say the same
    result["averages_outside"], result["resumable"] = (
        not known and impl.averages_outside,
        known or "state_dict" in abilities(impl),
    )
    final = worker.recorder.parameters()
    result["final"] = {name: tensor_bytes(p) for name, p in final.items()}
    result["shapes"] = {name: list(p.shape) for name, p in final.items()}
    result["state"] = (
        held(t for _, t in leaves(worker.recorder.optimizer.state_dict()) if isinstance(t, Tensor)) if known else 0
    )
    return result


def oracle_body(spec: str, slots: list[str], config: dict[str, Any]) -> dict[str, Any]:
    """The same training by one process: the implementation's model, torch's AdamW, gradients of all blocks added in rank order.

    Shares nothing with the pieces under judgement: data, mean and update are written out here.
    """
    c = TrainConfig.from_dict(config)
    torch.manual_seed(c.seed * 1009)
    model = build_model(resolve(spec, tuple(slots)), c.model).to(getattr(torch, c.dtype))
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=c.lr, betas=c.betas, eps=c.eps, weight_decay=c.weight_decay, foreach=False
    )
    tokens = make_corpus(c.seed, c.total_tokens, c.model.vocab)
    losses, digests = [], [_digest(model)]
    for step in range(c.steps):
        losses.append(_oracle_step(model, optimizer, tokens, c, step))
        digests.append(_digest(model))
    return {"losses": losses, "digests": digests, "final": {n: tensor_bytes(p) for n, p in model.named_parameters()}}


def _oracle_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor, c: TrainConfig, step: int
) -> list[float]:
    """One update on the mean of per-rank gradients; the loss of each rank's block."""
    width, blocks = c.batch * c.model.seq_len, c.world_size * c.micro_batches
    losses, total = [], None
    params = list(model.parameters())
    for rank in range(c.world_size):
        local: list[Tensor] | None = None
        for m in range(c.micro_batches):
            start = (step * blocks + rank * c.micro_batches + m) * (width + 1)
            x = tokens[start : start + width].view(c.batch, -1)
            y = tokens[start + 1 : start + width + 1]
            loss = nn.functional.cross_entropy(model(x).view(width, -1), y)
            grads = torch.autograd.grad(loss / c.micro_batches, params, allow_unused=True, materialize_grads=True)
            local = list(grads) if local is None else [a + b for a, b in zip(local, grads, strict=True)]
            losses.append(loss.item())
        assert local is not None
        total = local if total is None else [a + b for a, b in zip(total, local, strict=True)]
    assert total is not None
    for p, g in zip(params, total, strict=True):
        p.grad = g / c.world_size
    optimizer.step()
    return losses


def _digest(model: nn.Module) -> dict[str, str]:
    return {name: digest(p) for name, p in [*model.named_parameters(), *model.named_buffers()]}


@dataclass
class Composed:
    """Evidence of the composed run at one world size."""

    config: TrainConfig
    whole: Trace
    resumed: Trace | None
    resume_error: Exception | None
    snapshots: list[dict[str, str]]
    finals: list[dict[str, bytes]]
    averages_outside: bool
    shapes: dict[str, list[int]]
    state_bytes: list[int]


def _trace(subject: Subject, config: TrainConfig, results: list[dict[str, Any]]) -> Trace:
    header = {"impl": subject.spec, "config": config.to_dict()}
    return merge(header, [[Record(**r) for r in result["records"]] for result in results])


def composed(subject: Subject, config: TrainConfig) -> Composed:
    """Run (once a configuration) 20 steps with a checkpoint at 10; then, in fresh processes from other seeds, 10 to 20 from it."""
    return subject.evidence(("composed", str(config)), lambda: _compose(subject, config))  # type: ignore[no-any-return]  # memo


def _compose(subject: Subject, config: TrainConfig) -> Composed:
    folder = tempfile.mkdtemp(prefix="minigpt-dist-")
    try:
        N, plain = config.world_size, config.to_dict()
        results = subject.run(composed_body, N, plain, folder, False)
        resumed, failure = None, None
        try:
            if not results[0]["resumable"]:
                raise NotJudged("the optimizer has no state_dict and load_state_dict of its own")
            resumed = _trace(subject, config, subject.run(composed_body, N, plain, folder, True))
        except Exception as error:
            failure = error
        whole = _trace(subject, config, results)
        return Composed(
            config,
            whole,
            resumed,
            failure,
            [r["snapshot"] for r in results],
            [r["final"] for r in results],
            results[0]["averages_outside"],
            results[0]["shapes"],
            [r["state"] for r in results],
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def oracle(subject: Subject, config: TrainConfig) -> dict[str, Any]:
    """What one process gets (once a configuration)."""
    return subject.evidence(  # type: ignore[no-any-return]  # memo
        ("oracle", str(config)), lambda: subject.run(oracle_body, 1, config.to_dict())[0]
    )
