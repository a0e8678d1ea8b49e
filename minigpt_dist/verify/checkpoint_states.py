"""What the judge saves: states that differ from rank to rank and from version to version, and how two are compared.

Owns the states and the census. Leaves saving and loading them to `checkpoint_probe.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from minigpt_dist.trace import digest

State = dict[str, Any]
Census = dict[str, str]

# Kinds that every implementation must save: what a training state holds. The others may be refused, but not changed.
REQUIRED = frozenset(
    {"float32", "float64", "int64", "uint8", "scalar", "empty", "int", "float", "str", "bool", "nested"}
)


def lesson_states(world_size: int, version: int) -> list[State]:
    """One state a rank, as a training loop saves it: replicated model, sharded optimizer, counters, random stream.

    Shards are of different lengths; from three ranks on the last owns nothing.
    """
    states = []
    for rank in range(world_size):
        model, own = torch.Generator().manual_seed(version), torch.Generator().manual_seed(1000 * version + rank + 1)
        numel = 0 if world_size > 2 and rank == world_size - 1 else 600 + 37 * rank
        optim: State = {name: torch.randn(numel, generator=own) for name in ("master", "exp_avg", "exp_avg_sq")}
        optim |= {"step_count": 10 * version + rank, "lr": 0.1 / (version + rank)}
        states.append(
            {
                "model_state": {
                    "tok_embed.weight": torch.randn(8, 4, generator=model),
                    "blocks.0.ln1.bias": torch.randn(4, generator=model),
                    "blocks.0.count": torch.randint(0, 1 << 40, (), generator=model),
                },
                "optim_state": optim,
                "rank": rank,
                "rng": torch.randint(0, 256, (64,), generator=own, dtype=torch.uint8),
            }
        )
    return states


def mark(state: State) -> bytes:
    """Bytes that only this rank's state has: of its shard of the master weights, or else of its random stream."""
    master = state["optim_state"]["master"]
    raw: bytes = (master if master.numel() else state["rng"]).numpy().tobytes()
    return raw


def tensor_kinds(rank: int) -> State:
    """One tensor of every kind, by name."""
    own = torch.Generator().manual_seed(rank + 77)
    base = torch.randn(6, 5, generator=own)
    kinds = {name: base.to(getattr(torch, name)) for name in ("float32", "float64", "float16", "bfloat16")}
    kinds |= {name: (base * 40).to(getattr(torch, name)) for name in ("int64", "int32", "int8")}
    return kinds | {
        "uint8": (base.abs() * 40).to(torch.uint8),
        "bool": base > 0,
        "scalar": base[0, 0].clone(),
        "empty": torch.empty(0),
        "empty matrix": torch.empty(0, 3),
        "transposed": base.t(),
        "slice of a larger tensor": base[1:3, 1:4],
        "expanded": base[:, :1].expand(6, 4),
        "nan and infinities": torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0]),
        "parameter": torch.nn.Parameter(base.clone()),
    }


def value_kinds(rank: int) -> State:
    """One plain value of every kind, by name."""
    return {
        "int": 7 + rank,
        "large int": 2**53 + 1 + rank,
        "float": (1 + rank) / 3,
        "small float": 5e-324,
        "nan": float("nan"),
        "infinity": float("inf"),
        "str": f"GPT {rank}",
        "text": 'π "quoted"\n\\',
        "bool": rank % 2 == 0,
        "none": None,
        "list": [1, 2.5, "x", None, True, [rank]],
        "pair": (0.9, 0.999),
        "empty dict": {},
        "empty list": [],
        "nested": {"a": {"b": {"t": torch.full((3,), float(rank)), "n": rank}, "lr": 0.5}},
        "list of tensors": [torch.arange(3) + rank, torch.ones(2)],
    }


def census(value: Any, path: str = "") -> Census:
    """Path -> what is there, to the last bit. Tuples count as lists, any mapping as dict."""
    if isinstance(value, torch.Tensor):
        return {path: f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)} {digest(value.detach())[:16]}"}
    if isinstance(value, Mapping):
        parts, kind = {str(k): v for k, v in value.items()}, "dict"
    elif isinstance(value, (list, tuple)):
        parts, kind = {str(i): v for i, v in enumerate(value)}, "list"
    else:
        return {path: f"{type(value).__name__} {value!r:.200}"}
    found = {} if parts else {path: f"empty {kind}"}
    for name, part in parts.items():
        found |= census(part, f"{path}/{name}" if path else name)
    return found


def censuses(states: list[Any]) -> list[Census]:
    """One census a rank."""
    return [census(state) for state in states]


def difference(seen: list[Census], wanted: list[Census]) -> tuple[int | None, str | None, str, str] | None:
    """The first place where loaded states differ from the saved: (rank, path, seen, wanted); None if all is equal."""
    if len(seen) != len(wanted):
        return None, None, f"{len(seen)} states", f"{len(wanted)} states"
    for rank, (mine, right) in enumerate(zip(seen, wanted, strict=True)):
        for path, value in right.items():
            if mine.get(path) != value:
                return rank, path, mine.get(path, "absent"), value
        extra = sorted(set(mine) - set(right))
        if extra:
            return rank, extra[0], mine[extra[0]], "absent"
    return None


def change_in_place(value: Any) -> None:
    """Overwrite every tensor in `value`, as training on would."""
    if isinstance(value, torch.Tensor):
        with torch.no_grad():
            value.copy_(value.logical_not() if value.dtype is torch.bool else value + 1)
    elif isinstance(value, Mapping):
        for part in value.values():
            change_in_place(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            change_in_place(part)
