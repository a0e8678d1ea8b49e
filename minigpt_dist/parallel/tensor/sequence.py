"""What stands outside of tensor-parallel regions, where the sequence is cut there: LayerNorm and position embedding on S/N positions.

Owns that their parameters, whole on every rank, get the gradient of all positions (Korthikanti et al. 2022, section 4.2.2). Leaves
dropout there to `streams.RankDropout`.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from minigpt_dist.parallel.tensor.axis import TensorAxis
from minigpt_dist.parallel.tensor.operators import own_slice


class SequenceLayerNorm(nn.Module):
    """`norm` over the embedding of this rank's positions: (B, S/N, E) to the same."""

    def __init__(self, norm: nn.LayerNorm, axis: TensorAxis) -> None:
        super().__init__()
        self.axis, self.shape, self.eps = axis, norm.normalized_shape, norm.eps
        self.weight, self.bias = norm.weight, norm.bias

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.axis.replicated(self.weight, self.bias)
        return F.layer_norm(x, self.shape, weight, bias, self.eps)


class SequencePositions(nn.Module):
    """`embedding` of this rank's positions: from all positions (S,) to (S/N, E). ValueError where N does not divide S."""

    def __init__(self, embedding: nn.Embedding, axis: TensorAxis) -> None:
        super().__init__()
        self.axis, self.weight = axis, embedding.weight

    def forward(self, positions: Tensor) -> Tensor:
        (weight,) = self.axis.replicated(self.weight)
        return F.embedding(own_slice(positions, 0, self.axis.group), weight)
