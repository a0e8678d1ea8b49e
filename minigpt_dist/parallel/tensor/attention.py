"""Attention by heads: each rank computes num_heads/N heads, from its columns of the projections to its rows of the output's.

Owns which head is whose. Heads do not see each other before the output projection, so the sum in that is the one exchange
(Shoeybi et al. 2019, section 3).
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from minigpt_dist.model import CausalSelfAttention
from minigpt_dist.parallel.tensor.axis import TensorAxis
from minigpt_dist.parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear
from minigpt_dist.parallel.tensor.operators import even_share
from minigpt_dist.parallel.tensor.streams import rank_stream


class HeadParallelAttention(nn.Module):
    """`attention`, cut by heads over the axis: (B, S, E) to (B, S, E); with the sequence cut, (B, S/N, E) on both sides.

    Dropout of attention weights is drawn from a stream of this rank's own: its heads are no other rank's.
    ValueError where N does not divide the heads.
    """

    def __init__(self, attention: CausalSelfAttention, axis: TensorAxis) -> None:
        super().__init__()
        self.num_heads = even_share(attention.num_heads, axis.size, "num_heads")
        self.dropout, self.axis = attention.dropout, axis
        # The fused weight is q, k, v, one below the other, each of which is all heads: three blocks, cut alike.
        self.qkv = ColumnParallelLinear(attention.qkv, axis, blocks=3)
        self.proj = RowParallelLinear(attention.proj, axis)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x)  # (B, S, 3 E/N)
        q, k, v = qkv.unflatten(2, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)  # each (B, heads/N, S, E/heads)
        dropout = self.dropout if self.training else 0.0
        with rank_stream(self.axis, x.device, drawn=dropout > 0):
            out = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.proj(out.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]  # nn.Module call is Any
