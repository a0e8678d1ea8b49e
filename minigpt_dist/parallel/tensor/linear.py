"""Linear layers cut over ranks: by columns of the product, or by rows.

Owns the two cuts of Y = X W^T + b (Shoeybi et al. 2019, section 3) and that the bias is added once. Leaves what stands between a column
and a row cut (GELU, attention by heads) to its users: it acts on each column alone, so nothing is exchanged there.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from minigpt_dist.cut import Cut
from minigpt_dist.parallel.tensor.axis import TensorAxis
from minigpt_dist.parallel.tensor.operators import even_share, gather_from_region, scatter_to_region


class ColumnParallelLinear(nn.Module):
    """This rank's output features of a linear layer: input (B, S, in), output (B, S, out/N), a slice of the whole product.

    Args:
        linear: the unsharded layer, equal on all ranks; it is cut, and not used any more.
        blocks: of the output features, each cut for itself (3 for a fused query, key and value).
        gather_output: return the whole product (B, S, out) instead.

    ValueError where N does not divide a block.
    """

    def __init__(self, linear: nn.Linear, axis: TensorAxis, blocks: int = 1, gather_output: bool = False) -> None:
        super().__init__()
        even_share(linear.out_features // blocks, axis.size, "out_features")
        if gather_output and axis.sequence_parallel:
            raise ValueError(
                "gather_output is True, but should be False with the sequence cut: its output would be whole"
            )
        self.axis, self.gather_output = axis, gather_output
        cut = Cut(0, linear.out_features, blocks)
        self.weight = nn.Parameter(cut.part(linear.weight.detach(), axis.size, axis.rank))
        self.cuts = {"weight": cut}
        self.register_parameter("bias", None)
        if linear.bias is not None:
            self.bias = nn.Parameter(cut.part(linear.bias.detach(), axis.size, axis.rank))
            self.cuts["bias"] = cut

    def forward(self, x: Tensor) -> Tensor:
        out = F.linear(self.axis.enter(x), self.weight, self.bias)
        return gather_from_region(out, -1, self.axis.group) if self.gather_output else out


class RowParallelLinear(nn.Module):
    """This rank's input features of a linear layer: input (B, S, in/N), output the whole product, summed over ranks.

    The bias is whole on every rank, and added after the sum: inside of it, it would count N times.

    Args:
        linear: the unsharded layer, equal on all ranks; it is cut, and not used any more.
        input_is_parallel: is the input this rank's slice, as a column-parallel layer leaves it? Else it is (B, S, in), and cut here.

    ValueError where N does not divide the input features.
    """

    def __init__(self, linear: nn.Linear, axis: TensorAxis, input_is_parallel: bool = True) -> None:
        super().__init__()
        even_share(linear.in_features, axis.size, "in_features")
        self.axis, self.input_is_parallel = axis, input_is_parallel
        cut = Cut(1, linear.in_features)
        self.weight = nn.Parameter(cut.part(linear.weight.detach(), axis.size, axis.rank))
        self.cuts = {"weight": cut}
        self.register_parameter("bias", None)
        if linear.bias is not None:
            self.bias = nn.Parameter(linear.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        if not self.input_is_parallel:
            x = scatter_to_region(x, -1, self.axis.group)
        out = self.axis.leave(F.linear(x, self.weight))
        return out if self.bias is None else out + self.axis.replicated(self.bias)[0]
