"""What a peer is by design: where its optimizer state lies, how much there is, and what a resume needs.

Owns the declared facts and the bytes that follow from them, to the byte. They replace no check and loosen none: a peer is held to its own
figure exactly. Leaves measuring to `recorder.py` and the verdict to `checks/`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Shape = Sequence[int]
COUNTER_BYTES = 4  # torch.optim.AdamW's step count, a float32 tensor beside each parameter's moments


@dataclass(frozen=True)
class Traits:
    """Facts of one peer.

    bytes_per_element: optimizer bytes an owned element costs: 8 (two fp32 moments), 12 (and an fp32 master).
    owns: "all" (every rank, everything), "whole" (each parameter has one owner), "rows" (a block of rows of every
        parameter), "slices" (a slice of every parameter) or "flat" (a slice of one vector).
    alignment: a flat vector is padded to a multiple of this many elements a rank.
    buffers: buckets and gradient slices stay allocated, so only the tensors of the optimizer's state are counted.
    counters: each owned parameter carries a step count.
    sharded_parameters: the parameter shard is itself the fp32 master and counts 4 more, padded to equal blocks.
    settles_on_resume: a fresh wrapper adds gradients in another order at its first backward than later, so its load
        runs one forward and backward first.
    order: how the mean gradient is added up, a name in `replay.ORDERS`.
    """

    bytes_per_element: int
    owns: str
    alignment: int = 1
    buffers: bool = False
    counters: bool = True
    sharded_parameters: bool = False
    settles_on_resume: bool = False
    order: str = ""


def optimizer_bytes(traits: Traits, shapes: Mapping[str, Shape], world_size: int) -> list[int]:
    """Bytes of optimizer state that each rank holds, by the peer's own rule; ValueError for an unknown rule."""
    numels = [_numel(shape) for shape in shapes.values()]
    if traits.owns == "all":
        elements = [sum(numels)] * world_size
        owned = [len(numels)] * world_size
    elif traits.owns == "whole":
        elements, owned = _whole(numels, world_size)
    elif traits.owns == "rows":
        elements = [sum(_row_block(shape, world_size, rank) for shape in shapes.values()) for rank in range(world_size)]
        owned = [len(numels)] * world_size
    elif traits.owns == "slices":
        elements, owned = [sum(-(-numel // world_size) for numel in numels)] * world_size, [1] * world_size
    elif traits.owns == "flat":
        unit = traits.alignment * world_size
        elements = [-(-sum(numels) // unit) * traits.alignment] * world_size
        owned = [1] * world_size
    else:
        raise ValueError(f"owns is {traits.owns!r}, but should be one of all, whole, rows, slices, flat")
    counters = COUNTER_BYTES if traits.counters else 0
    master = 4 * sum(_row_block(shape, world_size, 0) for shape in shapes.values()) if traits.sharded_parameters else 0
    return [traits.bytes_per_element * n + counters * k + master for n, k in zip(elements, owned, strict=True)]


def _whole(numels: list[int], world_size: int) -> tuple[list[int], list[int]]:
    """Largest parameter first, each to the rank that holds least: (elements, parameters) of each rank."""
    elements, owned = [0] * world_size, [0] * world_size
    for numel in sorted(numels, reverse=True):
        least = elements.index(min(elements))
        elements[least] += numel
        owned[least] += 1
    return elements, owned


def _row_block(shape: Shape, world_size: int, rank: int) -> int:
    """Elements of block `rank` of ceil(rows/N) rows each: the last blocks may be short or empty."""
    rows = shape[0] if shape else 1
    block = -(-rows // world_size)
    mine = max(0, min(block, rows - rank * block))
    return mine * (_numel(shape) // rows)


def _numel(shape: Shape) -> int:
    numel = 1
    for size in shape:
        numel *= size
    return numel
