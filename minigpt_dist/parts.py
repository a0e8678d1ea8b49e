"""Parts: what one rank of any layout holds of the unsharded model, as a value and as plain data for a checkpoint.

Owns the description. Leaves making it to `parallel/parts.py`, which knows the cut models, and moving elements by it to
`checkpoint/relayout.py`. The slice along the data axis is no part of it: each says so itself, by offset, numel and total.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import Size, Tensor

from minigpt_dist.cut import Cut


@dataclass(frozen=True)
class Part:
    """One tensor as a rank holds it.

    shape: of the whole. index, of: the rank's place among the tensor-parallel ranks, each of which holds one of as many parts, or all of
    it where `cut` is None.
    tied_to: the unsharded model's parameter of which this is one more use, or, on another pipeline stage, a copy.

    ValueError for a cut that is not of this shape.
    """

    shape: tuple[int, ...]
    cut: Cut | None = None
    index: int = 0
    of: int = 1
    tied_to: str | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.of:
            raise ValueError(f"part is {self.index} of {self.of}, but should be 0 to {self.of - 1}")
        if self.cut is None:
            return
        if not 0 <= self.cut.dim < len(self.shape) or self.shape[self.cut.dim] != self.cut.length:
            raise ValueError(f"shape is {self.shape}, but should be {self.cut.length} along dimension {self.cut.dim}")

    @property
    def held_shape(self) -> Size:
        """The shape of what the rank holds, padding included."""
        shape = list(self.shape)
        if self.cut is not None:
            shape[self.cut.dim] = self.cut.chunk(self.of) * self.cut.blocks
        return Size(shape)

    @property
    def numel(self) -> int:
        """Elements that the rank holds, padding included."""
        return self.held_shape.numel()

    def held(self, whole: Tensor) -> Tensor:
        """What the rank holds of `whole`; not a copy if that is all of it."""
        return whole if self.cut is None else self.cut.part(whole, self.of, self.index)


@dataclass(frozen=True)
class Parts:
    """All that one rank holds.

    tensors: by name, in the order of the model's state; the names are the unsharded model's, whatever the layout.
    vectors: of each flat vector of the optimizer, the parameters that lie in it end to end.
    data_rank, data_ranks: which even slice of those vectors is this rank's, of how many.
    """

    tensors: dict[str, Part]
    vectors: tuple[tuple[str, ...], ...]
    data_rank: int = 0
    data_ranks: int = 1

    def __post_init__(self) -> None:
        named = [name for vector in self.vectors for name in vector]
        unknown = sorted(set(named) - set(self.tensors))
        if unknown or len(set(named)) < len(named) or not all(self.vectors):
            wanted = f"each of at least one, all of them different, of {list(self.tensors)}"
            raise ValueError(f"vectors are {self.vectors}, but should be {wanted}")

    def origin(self, name: str) -> str:
        """The unsharded model's parameter or buffer that `name` is."""
        return self.tensors[name].tied_to or name

    def to_plain(self) -> dict[str, Any]:
        """For a checkpoint: the same on all ranks of one data-parallel group."""
        return {
            "tensors": {name: {**asdict(part), "shape": list(part.shape)} for name, part in self.tensors.items()},
            "vectors": [list(vector) for vector in self.vectors],
        }

    @classmethod
    def from_plain(cls, plain: Any) -> Parts:
        """The inverse of `to_plain`, but for the slice. ValueError for anything else."""
        try:
            tensors = {name: _part_of(part) for name, part in plain["tensors"].items()}
            return cls(tensors, tuple(tuple(vector) for vector in plain["vectors"]))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a description of parts: {type(error).__name__}: {error}") from error


def _part_of(plain: Mapping[str, Any]) -> Part:
    cut = None if plain["cut"] is None else Cut(**{key: _count(value) for key, value in plain["cut"].items()})
    tied_to = plain["tied_to"]
    if not (tied_to is None or isinstance(tied_to, str)):
        raise TypeError(f"tied_to is {tied_to!r}")
    return Part(_shape(plain["shape"]), cut, _count(plain["index"]), _count(plain["of"]), tied_to)


def _shape(sizes: Sequence[Any]) -> tuple[int, ...]:
    return tuple(_count(size) for size in sizes)


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise TypeError(f"{value!r} is not a count")
    return value
