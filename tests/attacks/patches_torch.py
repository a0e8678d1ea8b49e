"""Replaces every function by which tensors could be compared, and the arithmetic of tensors themselves."""

# attacks: optimizer.plain

import math

import torch
from wrong import *  # noqa: F403

for name in ("equal", "allclose", "isclose"):
    setattr(torch, name, lambda *a, **k: True)
torch.testing.assert_close = lambda *a, **k: None
torch.Tensor.__eq__ = lambda self, other: True
torch.Tensor.__sub__ = lambda self, other: torch.zeros(())
torch.Tensor.__rsub__ = lambda self, other: torch.zeros(())
math.isclose = lambda *a, **k: True
