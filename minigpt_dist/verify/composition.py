"""The composed run under judgement: train with a checkpoint, then resume it in fresh processes; beside it, the one-process oracle.

Owns the evidence and how it is gathered. Leaves what ranks run to `composed_probe.py` and what it means to `checks/`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from minigpt_dist.batches import block_start, read_batch
from minigpt_dist.config import TrainConfig
from minigpt_dist.corpus import make_corpus
from minigpt_dist.launch import WireError
from minigpt_dist.trace import Record, Trace, digest, digest_of, merge, tensor_bytes
from minigpt_dist.verify.checkpoint_files import Files
from minigpt_dist.verify.composed_probe import (
    altered_body,
    composed_body,
    gradients_body,
    gradients_of,
    initial_body,
    initial_of,
)
from minigpt_dist.verify.contract import OURS
from minigpt_dist.verify.subject import NotJudged, Subject

OTHER_SEED = 500_009  # a resumed run starts from other random numbers
LONG = 4  # ranks up to which a run of a secret seed has all 20 steps


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
    files: Files
    bucket_bytes: list[int]


def _trace(subject: Subject, config: TrainConfig, results: list[dict[str, Any]]) -> Trace:
    """The trace of a run. WireError where a rank's last digests are not those of the parameters that it sent."""
    header = {"impl": subject.spec, "config": config.to_dict()}
    trace = merge(header, [[Record(**r) for r in result["records"]] for result in results])
    for record, result in zip(trace.at(trace.steps[-1]), results, strict=True):
        for name, raw in result["final"].items():
            if record.params.get(name) != digest_of(f"torch.{config.dtype}", result["shapes"][name], raw):
                raise WireError(f"rank {record.rank} sent a digest of {name} that is not that of its bytes")
    return trace


Body = Callable[..., Any]  # what a rank runs; what it returns


def composed(subject: Subject, config: TrainConfig, body: Body = composed_body) -> Composed:
    """Run (once a configuration) 20 steps with a checkpoint at 10; then, in fresh processes from other seeds, 10 to 20 from it."""
    key = ("composed", body.__name__, str(config))
    return subject.evidence(key, lambda: _compose(subject, config, body))  # type: ignore[no-any-return]  # memo


def _compose(subject: Subject, config: TrainConfig, body: Body) -> Composed:
    with subject.area() as area:
        results = subject.run(body, config.world_size, config.to_dict(), _tokens(config), area, None)
    files = results[0]["files"]
    resumed, failure = None, None
    try:
        if not results[0]["resumable"]:
            raise NotJudged("the optimizer has no state_dict and load_state_dict of its own")
        resumed = resume(subject, config, files, body)
    except Exception as error:
        failure = error
    return Composed(
        config,
        _trace(subject, config, results),
        resumed,
        failure,
        [r["snapshot"] for r in results],
        [r["final"] for r in results],
        results[0]["averages_outside"],
        results[0]["shapes"],
        [r["state"] for r in results],
        files,
        [r.get("buckets", 0) for r in results],
    )


def resume(subject: Subject, config: TrainConfig, files: Files, body: Body = composed_body) -> Trace:
    """Go on from a checkpoint, where there is nothing else of the run: no earlier data, no seed, no file, no process."""
    N, tokens = config.world_size, _tokens(config)
    tokens[: block_start(config, config.checkpoint_step, 0, 0)] = 0
    elsewhere = replace(config, seed=config.seed + OTHER_SEED).to_dict()
    with subject.area() as area:
        return _trace(subject, config, subject.run_afresh(body, N, elsewhere, tokens, area, files))


def altered(subject: Subject, evidence: Composed) -> tuple[str | None, Trace]:
    """The path of the moment that was changed in the checkpoint, and the run that goes on from the changed one."""
    config = evidence.config
    with subject.area() as area:
        results = subject.run_afresh(altered_body, config.world_size, config.to_dict(), area, evidence.files)
    return results[0]["altered"], resume(subject, config, results[0]["files"])


def _tokens(config: TrainConfig) -> Tensor:
    return make_corpus(config.seed, config.total_tokens, config.model.vocab)


def oracle(subject: Subject, config: TrainConfig) -> dict[str, Any]:
    """What one process gets (once a configuration): torch's AdamW on the gradients of all blocks, added in rank order.

    Shares nothing with the pieces under judgement: data, mean and update are the judge's own, in the judge's own process. Only the
    model is the implementation's; it is asked, at the parameters of each step, for the loss and the gradient of each block. Where
    the model is ours, beside pieces that are not, no process of the implementation is asked, and all implementations share the answer.
    """
    if subject.lacks(("model",)) and not subject.ours:  # ours is held to the bits that one thread gives
        return _own_oracle(config)

    def ask(body: Body, *args: Any) -> Any:
        return subject.ask(body, 1, config.to_dict(), *args)[0]

    def once() -> dict[str, Any]:
        return one_process(config, partial(ask, initial_body), partial(ask, gradients_body))

    return subject.evidence(("oracle", str(config)), once)  # type: ignore[no-any-return]  # memo


@functools.lru_cache(maxsize=16)
def _own_oracle(config: TrainConfig) -> dict[str, Any]:
    with torch.random.fork_rng(devices=[]):
        args: tuple[Any, ...] = (OURS, [], config.to_dict())
        return one_process(config, partial(initial_body, *args), partial(gradients_body, *args))


def oracle_of(model: torch.nn.Module, config: TrainConfig) -> dict[str, Any]:
    """What one process gets from a model of the judge's own, at its initial parameters; the model is moved."""
    return one_process(config, partial(initial_of, model), partial(gradients_of, model, config.micro_batches))


def one_process(c: TrainConfig, initial: Body, gradients: Body) -> dict[str, Any]:
    """Losses of each step and block, digests after each step, and the final bytes; `initial` and `gradients` answer for the model."""
    start = initial()
    named = {name: torch.nn.Parameter(t) for name, t in start["parameters"].items()}
    optimizer = torch.optim.AdamW(
        named.values(), lr=c.lr, betas=c.betas, eps=c.eps, weight_decay=c.weight_decay, foreach=False
    )
    tokens, losses, digests = _tokens(c), [], [_digests({**named, **start["buffers"]})]
    for step in range(c.steps):
        blocks = [read_batch(tokens, c, step, r, m) for r in range(c.world_size) for m in range(c.micro_batches)]
        at = {name: p.detach() for name, p in named.items()}
        answers = gradients(at, blocks)
        losses.append([loss for loss, _ in answers])
        for name, p in named.items():
            p.grad = _mean([grads[name] for _, grads in answers], c)
        optimizer.step()
        digests.append(_digests(named))
    return {"losses": losses, "digests": digests, "final": {name: tensor_bytes(p) for name, p in named.items()}}


def _mean(grads: list[Tensor], c: TrainConfig) -> Tensor:
    """The mean over ranks of the sums of their micro-batches, added in that order."""
    total: Tensor | None = None
    for rank in range(c.world_size):
        local, *rest = grads[rank * c.micro_batches : (rank + 1) * c.micro_batches]
        for more in rest:
            local = local + more
        total = local if total is None else total + local
    assert total is not None
    return total / c.world_size


def _digests(named: Mapping[str, Tensor]) -> dict[str, str]:
    return {name: digest(t) for name, t in named.items()}


def default_config(world_size: int) -> TrainConfig:
    """The run that the lesson's invariants are asked of."""
    return TrainConfig(world_size=world_size)


def asked_config(subject: Subject, world_size: int) -> TrainConfig:
    """The same, with data, weights and a learning rate (0.9 to 1.1 of it) that come from the subject's seed, if it has one.

    Under a seed a run of more than `LONG` ranks has half the steps: it costs as much as all smaller ones together, and what only
    so many ranks show (an uneven cut, an order, a rank too many), they show at the first steps.
    """
    number, plain = subject.draw(f"composed at {world_size}"), default_config(world_size)
    if not number:
        return plain
    if world_size > LONG:
        plain = replace(plain, steps=plain.steps // 2, checkpoint_step=plain.checkpoint_step // 2)
    return replace(plain, seed=number % 100_000, lr=plain.lr * (0.9 + 0.2 * (number % 1009) / 1008))


def evidence_of(subject: Subject, world_size: int) -> Composed:
    """The composed run that the checks share at this world size."""
    return composed(subject, asked_config(subject, world_size))
