"""What a rank does with a MiniGPT to show what its logits depend on; plain data comes back.

Owns the rank's side. Leaves what it means, and the reference it is held against, to `checks/model.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from minigpt_dist.config import ModelConfig
from minigpt_dist.verify.contract import resolve
from minigpt_dist.verify.plug import build_model

SIZES = ModelConfig()


def model_body(spec: str, slots: list[str], seed: int, known_names: list[str]) -> dict[str, Any]:
    """Logits for a sequence and for what is made of it: changed last, changed first, constant, one row alone, a prefix; and facts.

    A model whose parameters have the `known_names` is also run in float64.
    """
    impl = resolve(spec, tuple(slots))
    torch.manual_seed(3 + seed)  # after the import, which may set a seed of its own
    model = build_model(impl, SIZES)
    ids = torch.randint(0, SIZES.vocab, (2, SIZES.seq_len), generator=torch.Generator().manual_seed(seed))
    changed, early = ids.clone(), ids.clone()
    changed[:, -1] = (changed[:, -1] + 1) % SIZES.vocab
    early[:, 0] = (early[:, 0] + 1) % SIZES.vocab
    inputs = {"plain": ids, "again": ids, "changed": changed, "early": early, "same": torch.full_like(ids, 5)}
    inputs |= {"row": ids[1:], "prefix": ids[:, :5]}
    model.eval()
    with torch.no_grad():
        logits = {name: model(x).clone() for name, x in inputs.items()}
    result: dict[str, Any] = {"numel": sum(p.numel() for p in model.parameters()), "logits": logits}
    model.train()
    torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
    result["idle"] = [n for n, p in model.named_parameters() if p.grad is None or not bool(p.grad.any())]
    if {name for name, _ in model.named_parameters()} == set(known_names):
        result["double"] = _in_double(model, ids)
    return result


def _in_double(model: nn.Module, ids: Tensor) -> dict[str, Any]:
    """Parameters, token ids and logits in float64, for the judge to hold against a forward pass of its own."""
    model.eval().double()
    with torch.no_grad():
        logits = model(ids).clone()
    return {"parameters": {name: p.detach() for name, p in model.named_parameters()}, "ids": ids, "logits": logits}
