"""What this rank holds of the unsharded model, read off the model and its optimizer, so that a checkpoint can say so.

Owns the reading. Leaves the description itself to `minigpt_dist/parts.py`, and what a loader makes of it to `checkpoint/`.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from minigpt_dist.parallel.tensor.gpt import cuts_of
from minigpt_dist.parallel.zero import ZeroOptimizer
from minigpt_dist.parts import Part, Parts


def parts_of(model: nn.Module, optimizer: ZeroOptimizer, tied: Mapping[str, str] | None = None) -> Parts:
    """What this rank holds: the model's tensors by name, and the parameters in each flat vector of `optimizer`, in order.

    Args:
        model: whole, cut by tensor parallelism, or the layers of some pipeline stages, under the unsharded model's names.
        tied: name -> the unsharded model's parameter of which it is a copy, for what is tied across pipeline stages
            ({"head.weight": "tok_embed.weight"} on the last one). What is tied within `model` shows by itself.
    """
    cuts, tensors, first = cuts_of(model), model.state_dict(keep_vars=True), dict[int, str]()
    parts: dict[str, Part] = {}
    axis = next((axis for _, axis in cuts.values()), None)
    index, of = (0, 1) if axis is None else (axis.rank, axis.size)
    for name, tensor in tensors.items():
        origin = first.setdefault(id(tensor), name)
        tied_to = (tied or {}).get(origin, origin)
        shape, cut = [*tensor.shape], cuts[name][0] if name in cuts else None
        if cut is not None:
            shape[cut.dim] = cut.length
        parts[name] = Part(tuple(shape), cut, index, of, None if tied_to == name else tied_to)
    vectors = tuple(tuple(first[id(p)] for p in shard.flat.params) for shard in optimizer.shards)
    return Parts(parts, vectors, optimizer.rank, optimizer.world_size)
