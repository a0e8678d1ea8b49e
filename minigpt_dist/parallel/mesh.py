"""The mesh: which rank sits where on the data, tensor and pipeline axis of a layout, and the groups along each.

Owns the order of axes and the making of groups, in one order on all ranks. Leaves what is exchanged within a group to the pieces.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from minigpt_dist.layout import Layout
from minigpt_dist.parallel.collectives import Group, subgroup, world

AXES = ("pp", "dp", "tp")


class Coordinates(NamedTuple):
    """A rank's place: index on each axis, the outermost axis first.

    Tensor-parallel ranks are neighbours, as they exchange most, and stages are farthest apart (Narayanan et al. 2021, "Efficient
    large-scale language model training on GPU clusters using Megatron-LM", section 3).
    """

    pp: int
    dp: int
    tp: int


def coordinates_of(layout: Layout, rank: int) -> Coordinates:
    """Where `rank` sits. ValueError for a rank outside the layout."""
    if not 0 <= rank < layout.world_size:
        raise ValueError(f"rank is {rank}, but should be 0 to {layout.world_size - 1}")
    rest, tp = divmod(rank, layout.tp)
    return Coordinates(*divmod(rest, layout.dp), tp)


def rank_of(layout: Layout, place: Coordinates) -> int:
    """Who sits at `place`. ValueError for a place outside the layout."""
    for axis in AXES:
        index, size = getattr(place, axis), getattr(layout, axis)
        if not 0 <= index < size:
            raise ValueError(f"{axis} is {index}, but should be 0 to {size - 1}")
    return (place.pp * layout.dp + place.dp) * layout.tp + place.tp


def ranks_along(layout: Layout, rank: int, axes: Sequence[str]) -> list[int]:
    """The ranks, ascending, that share all of `rank`'s coordinates but those on `axes`: itself among them."""
    if not axes or len(set(axes)) < len(axes) or not set(axes) <= set(AXES):
        raise ValueError(f"axes are {tuple(axes)}, but should be different ones of {', '.join(AXES)}")
    here = coordinates_of(layout, rank)
    choices = [range(getattr(layout, axis)) if axis in axes else (getattr(here, axis),) for axis in AXES]
    return [rank_of(layout, Coordinates(*place)) for place in itertools.product(*choices)]


class Mesh:
    """The groups that this rank is in: one along each axis, and one for each of `combined`.

    All ranks of the world make it together, with equal arguments. Groups are made axis by axis: those of one axis share no rank, and
    every rank makes its group of one axis before its group of the next, so that none waits for another in a circle.

    Args:
        layout: of as many ranks as the world has.
        combined: sets of axes whose ranks are one group too. Default: ("pp", "tp"), the ranks that hold one replica of the model.

    Raises ValueError, before any group is made, if the layout is of another number of ranks or an axis is unknown.
    """

    def __init__(self, layout: Layout, combined: Sequence[Sequence[str]] = (("pp", "tp"),)) -> None:
        N, self.rank = world()
        if layout.world_size != N:
            raise ValueError(
                f"the layout's number of ranks is {layout.world_size}, but should be {N}, that of the world"
            )
        self.layout, self.place = layout, coordinates_of(layout, self.rank)
        wanted = [*((axis,) for axis in AXES), *(tuple(sorted(axes)) for axes in combined)]
        members = {axes: ranks_along(layout, self.rank, axes) for axes in wanted}
        made: dict[tuple[int, ...], Group] = {}
        for ranks in members.values():  # equal sets of ranks share one group
            if tuple(ranks) not in made:
                made[tuple(ranks)] = subgroup(ranks)
        self._groups = {axes: made[tuple(ranks)] for axes, ranks in members.items()}

    def group(self, *axes: str) -> Group:
        """This rank's group along `axes`, as every collective takes it. ValueError for axes that were not asked for."""
        if (key := tuple(sorted(axes))) not in self._groups:
            known = "; ".join(", ".join(each) for each in self._groups)
            raise ValueError(f"axes are {axes}, but should be among those that the mesh was made with: {known}")
        return self._groups[key]

    def ranks(self, *axes: str) -> list[int]:
        """The ranks, ascending, of this rank's group along `axes`."""
        return ranks_along(self.layout, self.rank, axes)
