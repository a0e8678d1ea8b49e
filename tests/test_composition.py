"""What only our own stack promises of the composed run: double precision against the full batch, exact traffic, other settings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from minigpt_dist import MiniGPT, TrainConfig, make_corpus
from minigpt_dist.verify.checks.composition import falling, replicas_agree
from minigpt_dist.verify.composition import Composed, _own_oracle, composed, oracle
from minigpt_dist.verify.subject import Subject

# Worst of 72 correct runs against one full batch, float64, 20 steps, relative to max(|p|, 1e-3): 1.7e-10. The smallest fault: 8.6e-2.
PARAM_REL_FLOAT64 = 1e-8


@pytest.fixture(scope="module")
def stack() -> Any:
    with Subject() as subject:
        yield subject


def full_batch(config: TrainConfig) -> dict[str, torch.Tensor]:
    """Parameters after the same training by one process on all ranks' sequences as one batch."""
    torch.manual_seed(config.seed * 1009)
    model = MiniGPT().double()
    adamw = torch.optim.AdamW(model.parameters(), lr=config.lr, weight_decay=0.0)
    tokens = make_corpus(config.seed, config.total_tokens)
    for step in range(config.steps):
        blocks = tokens.view(config.steps, config.world_size, config.block_tokens)[step]
        x, y = blocks[:, :-1].reshape(-1, config.model.seq_len), blocks[:, 1:].reshape(-1)
        adamw.zero_grad()
        nn.functional.cross_entropy(model(x).flatten(0, 1), y).backward()
        adamw.step()
    return {name: p.detach() for name, p in model.named_parameters()}


def final(evidence: Composed, name: str, like: torch.Tensor) -> torch.Tensor:
    return torch.frombuffer(bytearray(evidence.finals[0][name]), dtype=torch.float64).view_as(like)


@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_float64_run_equals_the_full_batch_within_its_bound(stack: Subject, world_size: int) -> None:
    config = TrainConfig(world_size=world_size, dtype="float64")
    evidence = composed(stack, config)
    worst = max(
        float(((final(evidence, n, p) - p).abs() / p.abs().clamp_min(1e-3)).max())
        for n, p in full_batch(config).items()
    )
    assert worst <= PARAM_REL_FLOAT64


@pytest.mark.parametrize("world_size", [2, *(pytest.param(N, marks=pytest.mark.slow) for N in (4, 5))])
def test_each_step_exchanges_the_gradient_once_and_the_parameters_once(stack: Subject, world_size: int) -> None:
    trace = composed(stack, TrainConfig(world_size=world_size)).whole
    padded = world_size * -(-29_824 // world_size)
    calls = [
        [(c["op"].split("_single")[0], c["numel"]) for c in r.collectives]
        for r in trace.records
        if r.step not in (0, 11)
    ]
    assert {tuple(step) for step in calls} == {(("all_to_all", padded), ("all_to_all", padded))}


SETTINGS = {
    "micro batches": TrainConfig(world_size=2, micro_batches=2, steps=4, checkpoint_step=2),
    "weight decay": TrainConfig(world_size=3, weight_decay=0.1, steps=4, checkpoint_step=2),
    "betas and eps": TrainConfig(world_size=2, betas=(0.8, 0.95), eps=1e-6, steps=4, checkpoint_step=2),
    "float64": TrainConfig(world_size=2, dtype="float64", steps=4, checkpoint_step=2),
}


NAMES = [pytest.param(n, marks=pytest.mark.slow if n in ("weight decay", "betas and eps") else ()) for n in SETTINGS]


@pytest.mark.parametrize("name", NAMES)
def test_run_is_bit_equal_to_one_process_under(stack: Subject, name: str) -> None:
    evidence, right = composed(stack, SETTINGS[name]), oracle(stack, SETTINGS[name])
    assert all(r.params == right["digests"][r.step] for r in evidence.whole.records)


@pytest.mark.parametrize("name", NAMES)
def test_resume_loses_no_byte_under(stack: Subject, name: str) -> None:
    evidence = composed(stack, SETTINGS[name])
    assert evidence.resumed is not None
    whole = {(r.step, r.rank): (r.params, r.optimizer) for r in evidence.whole.records}
    assert all(whole[r.step, r.rank] == (r.params, r.optimizer) for r in evidence.resumed.records)


def test_bfloat16_parameters_train_with_a_float32_master(stack: Subject) -> None:
    trace = composed(stack, TrainConfig(world_size=2, dtype="bfloat16")).whole
    assert replicas_agree(trace) == []
    assert {r.bytes["optimizer"] for r in trace.counted() if r.step} == {12 * 29_824 // 2}
    assert trace.mean_losses()[20] < trace.mean_losses()[1] - 2


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_loss_falls_for_other_seeds(stack: Subject, seed: int) -> None:
    assert falling(composed(stack, TrainConfig(world_size=2, seed=seed + 1)).whole) == []


@pytest.mark.slow
def test_the_oracle_that_submissions_without_a_model_share_is_the_one_that_ranks_give(stack: Any) -> None:
    config = TrainConfig(world_size=2, steps=3, checkpoint_step=0, seed=9)
    asked, own = oracle(stack, config)["losses"], _own_oracle(config)["losses"]
    assert [pytest.approx(step, rel=1e-6) for step in asked] == own
