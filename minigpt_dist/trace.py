"""The trace: what each rank of a run showed at each step, as plain data.

Owns the record, its file format (JSON Lines, one record a line: also the metrics export) and digests of tensors.
Leaves observing to `recorder.py` and judging to `verify/`.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import sha256  # by name: an implementation under judgement may replace what the module has
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def own_part(tensor: Tensor) -> Tensor:
    """What this rank holds of `tensor`: the local shard of one that torch spreads over ranks (a DTensor), else all of it.

    One that a functional collective has yet to bring (an AsyncCollectiveTensor, with no memory of its own) is waited for. By type, so
    that a subclass of an implementation under judgement has no say.
    """
    spread = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    own: Tensor = spread.to_local(tensor) if spread is not None and isinstance(tensor, spread) else tensor
    coming = getattr(sys.modules.get("torch.distributed._functional_collectives"), "AsyncCollectiveTensor", None)
    return coming.trigger_wait(own) if coming is not None and isinstance(own, coming) else own


def tensor_bytes(tensor: Tensor) -> bytes:
    """The elements of `tensor` on this rank in row-major order, as raw bytes, on any device and of any dtype."""
    own = own_part(tensor)
    with torch._C.DisableTorchFunctionSubclass():  # a subclass of an implementation's has no say in what its bytes are
        flat = Tensor.view(Tensor.contiguous(Tensor.to(Tensor.detach(own), "cpu")), -1)
        return Tensor.numpy(Tensor.view(flat, torch.uint8)).tobytes() if Tensor.numel(flat) else b""


def digest(tensor: Tensor) -> str:
    """sha256 over dtype, shape and bytes."""
    return digest_of(str(tensor.dtype), own_part(tensor).shape, tensor_bytes(tensor))


def digest_of(dtype: str, shape: Iterable[int], raw: bytes) -> str:
    """The digest of a tensor whose bytes are known: dtype as in `torch.float32`."""
    return sha256(f"{dtype} {tuple(shape)} ".encode() + raw).hexdigest()


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(path, leaf) of nested mappings and sequences, keys sorted, so that equal states list equally."""
    if isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield from leaves(value[key], f"{path}.{key}" if path else str(key))
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from leaves(item, f"{path}.{i}" if path else str(i))
    else:
        yield path, value


def state_digests(state: Any) -> dict[str, str]:
    """Path -> digest of every tensor, and -> repr of every other leaf, of a nested state."""
    return {path: digest(leaf) if isinstance(leaf, Tensor) else repr(leaf) for path, leaf in leaves(state)}


@dataclass(frozen=True)
class Record:
    """One rank at one step; `step` counts completed updates, so step 0 is the state before training.

    loss: this rank's mean over its micro-batches, nats a token; nan at step 0.
    grad_norm: 2-norm of this rank's own gradient before any exchange; nan where it is exchanged as it arises.
    grad_sq: squared 2-norm of this rank's slice of the mean gradient.
    param_norm: 2-norm over all parameters, summed in float64 in declaration order.
    params: name -> digest, parameters and buffers. optimizer: path -> digest of the state dict's leaves.
    update_ratio: how far a sample of the parameters moved in this step, over its size. drift: which numbers are far from usual, and the
    factor (`drift.py`).
    loss_scale: what the step's loss was multiplied by; nan without a scale. skipped: steps left out for an overflow, in the run so far.
    spans: [what, start, end] of each stretch of computing, where a timeline is kept, by the clock that `collectives` then go by too.
    bytes: kind -> bytes held. collectives: what was called since the last record. tokens: ids read. seconds: by phase.
    """

    step: int
    rank: int
    loss: float = math.nan
    grad_norm: float = math.nan
    grad_sq: float = math.nan
    param_norm: float = math.nan
    loss_scale: float = math.nan
    skipped: int = 0
    params: dict[str, str] = field(default_factory=dict)
    optimizer: dict[str, str] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)
    collectives: list[dict[str, Any]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    update_ratio: float = math.nan
    drift: dict[str, float] = field(default_factory=dict)
    spans: list[list[Any]] = field(default_factory=list)


@dataclass
class Trace:
    """All records of a run. `header` says what ran: implementation, configuration."""

    header: dict[str, Any]
    records: list[Record]

    def __post_init__(self) -> None:
        self.records.sort(key=lambda r: (r.step, r.rank))

    @property
    def world_size(self) -> int:
        return 1 + max((r.rank for r in self.records), default=-1)

    @property
    def steps(self) -> list[int]:
        """Steps recorded, ascending."""
        return sorted({r.step for r in self.records})

    def at(self, step: int) -> list[Record]:
        """Records of one step, in rank order."""
        return [r for r in self.records if r.step == step]

    def counted(self) -> list[Record]:
        """Records of the steps after which memory was counted."""
        return [r for r in self.records if r.bytes]

    def mean_losses(self) -> dict[int, float]:
        """Step -> loss averaged over ranks, for steps that trained."""
        return {s: math.fsum(r.loss for r in rs) / len(rs) for s in self.steps if s and (rs := self.at(s))}

    def grad_norms(self) -> dict[int, float]:
        """Step -> 2-norm of the mean gradient, from the ranks' disjoint slices."""
        return {s: math.sqrt(math.fsum(r.grad_sq for r in self.at(s))) for s in self.steps if s}

    def skips(self) -> list[int]:
        """The steps that were left out, on all ranks, because a gradient overflowed under the loss scale."""
        counts = [(s, self.at(s)[0].skipped) for s in self.steps]
        return [b for (_, before), (b, after) in itertools.pairwise(counts) if after > before]

    def write(self, path: Path) -> None:
        """JSON Lines: the header first, then a line a record."""
        lines = [json.dumps({"header": self.header}, sort_keys=True), *(to_line(r) for r in self.records)]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def to_line(record: Record) -> str:
    """One record as one line of JSON."""
    return json.dumps(vars(record), sort_keys=True)


def read_trace(path: Path) -> Trace:
    """Read what `Trace.write` wrote. ValueError names the line that is not a record."""
    header: dict[str, Any] = {}
    records: list[Record] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            data = json.loads(line)
            if "header" in data:
                header = data["header"]
            else:
                records.append(Record(**data))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path} line {number} is {line[:60]!r}, but should be one trace record") from error
    return Trace(header, records)


def merge(header: dict[str, Any], per_rank: Iterable[Iterable[Record]]) -> Trace:
    """One trace from the records that each rank kept."""
    return Trace(header, [record for records in per_rank for record in records])
