"""Faults where a sequence, or a gradient's norm, is cut over the ranks of a layer: replicated parameters, positions, clipping."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from minigpt_dist.verify.faults.catalogue import Names, fault
from minigpt_dist.verify.faults.layers import ALONE, pair, total
from minigpt_dist.verify.faults.sequence_layers import Clip, Norm, joined, own, ranks

Params = list[nn.Parameter]


def _norm(shared: Callable[[Norm, Tensor], Tensor]) -> Names:
    """LayerNorm whose gradients of weight and bias go through `shared`."""

    class Wrong(Norm):
        def shared(self, grad: Tensor) -> Tensor:
            return shared(self, grad)

    return {"SequenceLayerNorm": Wrong}


@fault(
    source="EleutherAI/gpt-neox#1257; TTrace (arXiv 2506.09280), bug 12, NVIDIA/Megatron-LM#1446: the final LayerNorm",
    needs="ranks with different positions",
    check="sequence.norm",
    stage="backward",
    rank=0,
    tensor="gradient of weight",
    green=("sequence.gather", "sequence.scatter"),
    equivalent=ALONE,
)
def layernorm_grads_not_summed_over_tp() -> Names:
    """Every rank keeps the gradient of its own positions, and the copies of the weight drift apart."""
    return _norm(lambda norm, grad: grad)


@fault(
    source="a mean over ranks where each has a part of the sum",
    needs="ranks with different positions",
    check="sequence.norm",
    stage="backward",
    tensor="gradient of weight",
    equivalent=ALONE,
)
def layernorm_grads_averaged_over_tp() -> Names:
    """Gradients are averaged over the ranks that share a sequence."""
    return _norm(lambda norm, grad: total(grad, norm.group) / norm.world_size)


@fault(
    source="TTrace (arXiv 2506.09280), bug 14, NVIDIA/Megatron-LM#1528",
    needs="a second axis beside the sequence's",
    check="sequence.axes",
    stage="backward",
    world_size=4,
    tensor="gradient of weight",
    green=("sequence.norm",),
)
def layernorm_grads_summed_twice_on_two_axes() -> Names:
    """Where the world is larger than the sequence's group, the gradient is summed once more."""

    def shared(norm: Norm, grad: Tensor) -> Tensor:
        once = total(grad, norm.group)
        return once if ranks()[0] == norm.world_size else total(once, norm.group)

    return _norm(shared)


@fault(
    source="a collective without its group",
    needs="a second axis beside the sequence's",
    check="sequence.axes",
    stage="backward",
    world_size=4,
    tensor="gradient of weight",
    green=("sequence.norm",),
)
def layernorm_grads_summed_over_the_world() -> Names:
    """The group is forgotten: gradients of other replicas are added."""
    return _norm(lambda norm, grad: total(grad))


@fault(
    source="Korthikanti et al. 2022, section 4.2: the gather's partner is a reduce-scatter",
    needs="uses that differ between ranks",
    check="sequence.gather",
    stage="backward",
    tensor="gradient of the input",
    green=("sequence.scatter", "sequence.norm"),
    equivalent=ALONE,
)
def gathered_sequence_gets_its_own_gradient_alone() -> Names:
    """Backward of the gather takes this rank's part of its own gradient, without the other ranks'."""
    return {"gather_sequence": lambda x: pair(x, joined, own)}


@fault(
    source="Korthikanti et al. 2022, section 4.2: the scatter is a sum first",
    needs="parts that differ between ranks",
    check="sequence.scatter",
    stage="forward",
    tensor="output",
    green=("sequence.gather",),
    equivalent=ALONE,
)
def scattered_sequence_is_not_summed() -> Names:
    """Every rank keeps its positions of its own part of the sum."""
    return {"scatter_sequence": lambda x: pair(x, own, joined)}


@fault(
    source="Korthikanti et al. 2022, section 4.2: the scatter's partner is an all-gather",
    needs="positions of other ranks",
    check="sequence.scatter",
    stage="backward",
    tensor="gradient of the input",
    green=("sequence.gather",),
    equivalent=ALONE,
)
def scattered_sequence_knows_its_own_positions_gradient_alone() -> Names:
    """Backward leaves zeros where other ranks have the positions."""

    def back(grad: Tensor) -> Tensor:
        N, rank = ranks()
        return torch.cat([grad if r == rank else torch.zeros_like(grad) for r in range(N)], 1)

    return {"scatter_sequence": lambda x: pair(x, lambda x: own(total(x)), back)}


def _clip(kind: type[Clip]) -> Names:
    return {"clip_sharded_grad_norm": kind()}


@fault(
    source="ROCm/TransformerEngine#715",
    needs="a gradient that every rank holds",
    check="clipping.cut",
    stage="clip",
    tensor="norm",
    equivalent=ALONE,
)
def tp_replicated_weights_overcounted() -> Names:
    """What every rank holds counts once a rank."""

    class Wrong(Clip):
        def norm(self, sharded: Params, replicated: Params) -> float:
            return float(total(self.squares([*sharded, *replicated])).sqrt())

    return _clip(Wrong)


@fault(
    source="TrainCheck (arXiv 2506.14813), BLOOM-176B: deepspeedai/DeepSpeed#1801",
    needs="a norm above the bound, and the gradients of a rank that is not the first",
    check="clipping.cut",
    stage="clip",
    rank=1,
    tensor="gradients of what is cut",
    equivalent=ALONE,
)
def clips_on_the_first_rank_only() -> Names:
    """Gradients are scaled on rank 0 alone, and replicated weights drift apart."""

    class Wrong(Clip):
        def scale(self, norm: float, max_norm: float) -> float:
            return super().scale(norm, max_norm) if ranks()[1] == 0 else 1.0

    return _clip(Wrong)


@fault(
    source="torch.nn.utils.clip_grad_norm_ on each rank's own parameters",
    needs="two ranks",
    check="clipping.cut",
    stage="clip",
    rank=0,
    tensor="norm",
    equivalent=ALONE,
)
def norm_of_the_ranks_own_part() -> Names:
    """Every rank clips by the norm of what it holds."""

    class Wrong(Clip):
        def norm(self, sharded: Params, replicated: Params) -> float:
            return float(self.squares([*sharded, *replicated]).sqrt())

    return _clip(Wrong)


@fault(
    source="norms that are added in place of squares",
    needs="two ranks",
    check="clipping.cut",
    stage="clip",
    tensor="norm",
    equivalent=ALONE,
)
def norms_of_parts_are_added() -> Names:
    """The norm of the whole is taken for the sum of the parts' norms."""

    class Wrong(Clip):
        def norm(self, sharded: Params, replicated: Params) -> float:
            parts = total(self.squares(sharded).sqrt()) ** 2
            return float((parts + self.squares(replicated)).sqrt())

    return _clip(Wrong)


@fault(
    source="max_norm / norm without its bound of 1",
    needs="a norm below the bound",
    check="clipping.cut",
    stage="clip",
    tensor="gradients of what is cut",
)
def small_gradients_are_scaled_up() -> Names:
    """Gradients whose norm is below the bound are brought up to it."""

    class Wrong(Clip):
        def scale(self, norm: float, max_norm: float) -> float:
            return max_norm / norm

    return _clip(Wrong)
