"""Activations: what autograd keeps is counted once, until it is freed, and is what the formula says, to the byte."""

from __future__ import annotations

from dataclasses import asdict

import pytest
import torch

from minigpt_dist.activations import SavedBytes, layer_activations
from minigpt_dist.config import ModelConfig
from minigpt_dist.loss import next_token_loss
from minigpt_dist.model import MiniGPT

MODELS = {
    "default": ModelConfig(),
    "odd": ModelConfig(vocab=19, embed_dim=40, num_heads=5, num_layers=3, seq_len=7, mlp_ratio=2),
    "tied": ModelConfig(num_heads=1, num_layers=1, seq_len=33, tie_head=True),
}


def loss_of(config: ModelConfig, batch: int, dtype: torch.dtype) -> tuple[torch.nn.Module, torch.Tensor, SavedBytes]:
    model = MiniGPT(**asdict(config)).to(dtype)
    ids = torch.randint(0, config.vocab, (batch, config.seq_len))
    with SavedBytes(model.parameters()) as saved:
        loss = next_token_loss(model(ids), ids)
    return model, loss, saved


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [pytest.param("default", marks=pytest.mark.slow), "odd", "tied"])
@pytest.mark.parametrize("batch", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_a_forward_keeps_the_bytes_of_the_formula(name: str, batch: int, dtype: torch.dtype) -> None:
    _, loss, saved = loss_of(MODELS[name], batch, dtype)
    assert saved.now == saved.peak == sum(layer_activations(MODELS[name], batch, dtype))
    loss.backward()
    assert saved.now == 0


def test_two_forwards_under_way_keep_twice_the_bytes_of_one() -> None:
    model, ids = MiniGPT(), torch.zeros(2, 16, dtype=torch.int64)
    one = sum(layer_activations(ModelConfig(), 2, torch.float32))
    with SavedBytes(model.parameters()) as saved:
        first, second = (next_token_loss(model(ids), ids) for _ in range(2))
        first.backward()
    assert (saved.peak, saved.now) == (2 * one, one)
    del second
    assert saved.now == 0


@pytest.mark.slow
def test_counting_changes_no_bit() -> None:
    gradients = []
    for counted in (True, False):
        torch.manual_seed(0)
        model, ids = MiniGPT(), torch.arange(32).view(2, 16)
        saved = SavedBytes(model.parameters())
        if counted:
            saved.__enter__()
        next_token_loss(model(ids), ids).backward()
        if counted:
            saved.__exit__(None, None, None)
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_a_model_with_dropout_is_refused_by_the_formula() -> None:
    with pytest.raises(ValueError, match=r"dropout is 0\.1, but should be 0 for the formula"):
        layer_activations(ModelConfig(dropout=0.1), 1, torch.float32)
