"""Hand-made states of any layout: what each of its ranks saves, of a model that is nothing but a list of parameters."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from hypothesis import strategies as st
from torch import Tensor

from minigpt_dist.cut import Cut
from minigpt_dist.parts import Part, Parts

KINDS = ("model", "master", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Layer:
    """A parameter of a model that is nothing but a list of them. `cut_dim`: along which tensor parallelism cuts it, in `blocks`."""

    name: str
    shape: tuple[int, ...]
    cut_dim: int | None = None
    blocks: int = 1


Layers: TypeAlias = tuple[Layer, ...]


@dataclass(frozen=True)
class Spread:
    """A layout: `stages[i]` is the pipeline rank of layer i."""

    dp: int
    tp: int
    stages: tuple[int, ...]

    @property
    def pp(self) -> int:
        return max(self.stages) + 1

    @property
    def world_size(self) -> int:
        return self.dp * self.tp * self.pp


@functools.lru_cache
def whole_of(layers: Layers, kind: str) -> dict[str, Tensor]:
    """Every element another number, but for one that is no number and one that is minus zero."""
    made, first = {}, KINDS.index(kind) * 10_000.0
    for layer in layers:
        numel = torch.Size(layer.shape).numel()
        made[layer.name] = torch.arange(first, first + numel).view(layer.shape)
        first += numel
    last = list(made.values())[-1].view(-1)
    last[:1], last[-1:] = torch.nan, -0.0
    return made


def cut_by_hand(layer: Layer, whole: Tensor, tp: int, index: int) -> Tensor:
    """As a tensor-parallel rank holds it: of each block one of `tp` equal parts, the last ones short and filled up with zeros."""
    if layer.cut_dim is None:
        return whole
    parts = []
    for block in whole.chunk(layer.blocks, layer.cut_dim):
        rows = block.movedim(layer.cut_dim, 0)
        each = -(-len(rows) // tp)
        mine = rows[index * each : (index + 1) * each]
        parts.append(torch.cat([mine, mine.new_zeros(each - len(mine), *rows.shape[1:])]))
    return torch.cat(parts).movedim(0, layer.cut_dim)


def held(layers: Layers, spread: Spread, tied: bool, place: tuple[int, int, int]) -> list[tuple[str, Layer]]:
    """(name, layer) of what the rank at (pp, dp, tp) holds; tied: the last layer is the first one, once more, on the last stage."""
    own = [(x.name, x) for x, stage in zip(layers, spread.stages, strict=True) if stage == place[0]]
    return own + ([("again", layers[0])] if tied and place[0] == spread.pp - 1 else [])


def parts_by_hand(layers: Layers, spread: Spread, tied: bool, place: tuple[int, int, int]) -> Parts:
    here = held(layers, spread, tied, place)
    first_too = layers[0] in [x for name, x in here if name != "again"]
    tensors = {
        name: Part(
            x.shape,
            None if x.cut_dim is None else Cut(x.cut_dim, x.shape[x.cut_dim], x.blocks),
            place[2],
            spread.tp,
            layers[0].name if name == "again" else None,
        )
        for name, x in here
    }
    trained = tuple(name for name, _ in here if not (name == "again" and first_too))
    return Parts(tensors, (trained,), place[1], spread.dp)


def state_by_hand(layers: Layers, spread: Spread, tied: bool, place: tuple[int, int, int]) -> dict[str, Any]:
    """What the rank at (pp, dp, tp) saves, if the optimizer has updated layer i i + 1 times."""
    here, parts = held(layers, spread, tied, place), parts_by_hand(layers, spread, tied, place)
    cut = {
        kind: {name: cut_by_hand(x, whole_of(layers, kind)[x.name], spread.tp, place[2]) for name, x in here}
        for kind in KINDS
    }
    (trained,) = parts.vectors
    flat = {kind: torch.cat([cut[kind][name].reshape(-1) for name in trained]) for kind in KINDS[1:]}
    total = len(flat["master"])
    chunk = -(-total // spread.dp)
    offset = min(place[1] * chunk, total)
    end = min(offset + chunk, total)
    steps, begin = [], 0
    for name in trained:
        numel = cut["model"][name].numel()
        count = 1 + layers.index(dict(here)[name])
        steps.append(count if max(begin, offset) < min(begin + numel, end) else 0)
        begin += numel
    shard = {"offset": offset, "numel": end - offset, "total": total, **{k: v[offset:end] for k, v in flat.items()}}
    return {
        "step": 10,
        "model": {name: tensor.clone() for name, tensor in cut["model"].items()},
        "optimizer": {"shards": [{**shard, "steps": steps}], "groups": [{"lr": 0.1, "betas": [0.9, 0.99]}]},
        "rng": None,
        "skipped": [5],
        "parts": parts.to_plain(),
    }


def places(spread: Spread) -> list[tuple[int, int, int]]:
    return [(p, d, t) for p in range(spread.pp) for d in range(spread.dp) for t in range(spread.tp)]


def states_by_hand(layers: Layers, spread: Spread, tied: bool = False) -> list[dict[str, Any]]:
    return [state_by_hand(layers, spread, tied, place) for place in places(spread)]


@st.composite
def layer_lists(draw: st.DrawFn) -> Layers:
    made = []
    for i in range(draw(st.integers(1, 6))):
        blocks = draw(st.sampled_from([1, 1, 2, 3]))
        shape = [draw(st.integers(1, 5)) for _ in range(draw(st.integers(1, 3)))]
        dim = draw(st.none() | st.integers(0, len(shape) - 1))
        if dim is not None:
            shape[dim] *= blocks
        made.append(Layer(f"layer.{i}", tuple(shape), dim, blocks))
    return tuple(made)


@st.composite
def spreads(draw: st.DrawFn, layers: int) -> Spread:
    """Any stage for any layer, as an interleaved schedule may have it, but none without a layer."""
    stages = draw(st.lists(st.integers(0, 2), min_size=layers, max_size=layers))
    known = sorted(set(stages))
    return Spread(draw(st.integers(1, 3)), draw(st.integers(1, 3)), tuple(known.index(stage) for stage in stages))


MODEL = (
    Layer("tok_embed.weight", (7, 4), 0),  # seven rows: two ranks pad one
    Layer("blocks.0.ln.weight", (4,)),
    Layer("blocks.0.qkv.weight", (12, 4), 0, blocks=3),
    Layer("blocks.1.proj.weight", (4, 8), 1),
    Layer("ln_f.weight", (4,)),
)
CUBE = Spread(2, 2, (0, 0, 1, 0, 1))
CUBE_TIED = states_by_hand(MODEL, CUBE, tied=True)
ONE = Spread(1, 1, (0,) * 5)


def shard(states: list[dict[str, Any]], rank: int) -> dict[str, Any]:
    found: dict[str, Any] = states[rank]["optimizer"]["shards"][0]
    return found
