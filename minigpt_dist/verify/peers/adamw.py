"""The optimizer that all peers share out: torch's AdamW with a run's options."""

from __future__ import annotations

from typing import Any

from minigpt_dist.config import TrainConfig


def adamw_options(config: TrainConfig) -> dict[str, Any]:
    """The options of torch.optim.AdamW that a run sets."""
    return {"lr": config.lr, "betas": config.betas, "eps": config.eps, "weight_decay": config.weight_decay}
