"""The loss that is trained on.

Owns next-token cross-entropy, the same for every model that is plugged in.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

HALVES = (torch.float16, torch.bfloat16)


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy, in nats a token, of logits (B, S, vocab) against token ids (B, S); 16-bit logits are taken to float32."""
    logits = logits.float() if logits.dtype in HALVES else logits
    return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.reshape(-1))
