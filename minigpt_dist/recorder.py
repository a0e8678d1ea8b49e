"""The observer that turns one rank's run into trace records.

Owns every measurement of a run: norms, digests, bytes and times are computed here, from the tensors themselves,
never asked of the implementation. Leaves the verdict to `verify/`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn

from minigpt_dist.drift import Drift
from minigpt_dist.launch import in_flight, ledger
from minigpt_dist.memory import census
from minigpt_dist.trace import Record, digest, own_part, state_digests

ALL = frozenset({"digests", "bytes", "collectives"})
TIMELINE = "timeline"  # to be watched too: when what was computed and exchanged
PER_TENSOR = 64  # elements of each parameter whose movement is followed


def norm_of(tensors: Iterable[Tensor]) -> float:
    """2-norm over all elements of `tensors`, added in float64 in the order given."""
    return math.sqrt(math.fsum(float(own_part(t).detach().double().square().sum()) for t in tensors))


def sample(tensors: Iterable[Tensor]) -> list[float]:
    """Up to `PER_TENSOR` elements of each tensor, evenly spread."""
    found: list[float] = []
    for t in tensors:
        flat = own_part(t).detach().reshape(-1)
        found += flat[:: max(flat.numel() // PER_TENSOR, 1)][:PER_TENSOR].tolist()
    return found


def whole_parameters(model: nn.Module) -> Iterable[tuple[str, Tensor]]:
    """Parameters by name, as they are: each rank holds all of them."""
    return model.named_parameters()


class Recorder:
    """Collects one Record a step; `watch` chooses what is looked at beyond loss, norms, tokens and times.

    `on_record` is called with each record as soon as it is complete (a live metrics file, a progress bar).
    `full_parameters` collects the parameters of a model that shards them, and may count on being called inside of `gathered`; both
    run on all ranks at once, unrecorded.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        rank: int,
        *,
        watch: frozenset[str] = ALL,
        known_storages: Sequence[UntypedStorage] = (),
        last_step: int = 0,
        on_record: Callable[[Record], object] | None = None,
        full_parameters: Callable[[nn.Module], Iterable[tuple[str, Tensor]]] = whole_parameters,
        gathered: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self.model, self.optimizer, self.rank = model, optimizer, rank
        self.watch, self.known_storages, self.on_record = watch, known_storages, on_record
        self.full_parameters, self.last_step = full_parameters, last_step
        self.scaler = getattr(optimizer, "scaler", None)
        self.gathered = gathered
        self.records: list[Record] = []
        self._tokens: list[int] = []
        self._grad_norm = self._loss_scale = math.nan
        self._clock, self._talked = time.perf_counter(), 0.0
        self._seconds: dict[str, float] = {}
        self._spans: list[list[Any]] = []
        in_flight.time_calls(TIMELINE in watch)
        self._drift, self._sample = Drift(), list[float]()

    def _is_counted(self, step: int) -> bool:
        """Is memory counted after `step`? A census takes milliseconds; the first, every fifth and the last show a peak and a growth."""
        return step <= 2 or step % 5 == 0 or step == self.last_step

    def batch(self, inputs: Tensor) -> None:
        """Note the token ids that are about to be fed to the model."""
        self._tokens.extend(inputs.flatten().tolist())

    def computed(self, what: str, start: float, end: float) -> None:
        """Note a stretch of computing, by time.perf_counter: "F" forward, "B" backward, "U" the update."""
        if TIMELINE in self.watch:
            self._spans.append([what, start, end])

    def started(self, step: int) -> None:
        ledger.clear()
        self._append(step, math.nan)

    def backward_done(self, step: int) -> None:
        self._lap("forward_backward")
        own = [p.grad for p in self.model.parameters() if p.grad is not None]
        self._grad_norm = norm_of(own) if own else math.nan  # none are left where backward itself exchanges them
        if self.scaler is not None:
            self._loss_scale = self.scaler.scale
            self._grad_norm /= self._loss_scale
        self._clock = time.perf_counter()

    def updated(self, step: int, losses: list[float]) -> None:
        self.computed("U", self._clock, time.perf_counter())
        self._lap("optimizer")
        self._append(step, math.fsum(losses) / len(losses))

    def rewind(self, step: int) -> None:
        """The run has gone back to `step`: forget the records of later ones. What `on_record` was told stays told."""
        self.records = [record for record in self.records if record.step <= step]

    def _lap(self, phase: str) -> None:
        """End a phase: its time without that in communication, which has a name of its own."""
        now, talked = time.perf_counter(), ledger.seconds()
        self._seconds[phase] = now - self._clock - (talked - self._talked)
        self._seconds["communication"] = self._seconds.get("communication", 0.0) + talked - self._talked
        self._clock, self._talked = now, talked

    def _append(self, step: int, loss: float) -> None:
        calls = ledger.entries() if "collectives" in self.watch else []
        counted = (
            census(self.model, self.known_storages) if "bytes" in self.watch and self._is_counted(step) else {}
        )  # before parameters are collected
        norm, ratio, params = self._look_at_parameters()
        record = Record(
            step=step,
            rank=self.rank,
            loss=loss,
            grad_norm=self._grad_norm,
            grad_sq=float(getattr(self.optimizer, "last_grad_sq", math.nan)) if step else math.nan,
            param_norm=norm,
            loss_scale=self._loss_scale,
            skipped=0 if self.scaler is None else self.scaler.skipped,
            params=params,
            optimizer=state_digests(self.optimizer.state_dict()) if "digests" in self.watch else {},
            bytes=counted,
            collectives=calls,
            tokens=self._tokens,
            seconds=self._seconds,
            update_ratio=ratio,
            spans=self._spans,
        )
        if step:
            self._flag(record)
        self.records.append(record)
        if self.on_record:
            self.on_record(record)
        ledger.clear()
        self._tokens, self._seconds, self._spans = [], {}, []
        self._grad_norm = self._loss_scale = math.nan
        self._clock, self._talked = time.perf_counter(), 0.0

    def _moved(self, params: Iterable[Tensor]) -> float:
        """How far a sample of the parameters has moved since the last record, over its size; nan at first.

        A list of numbers, and not many: a copy of the parameters would be memory that the run does not need.
        """
        before, self._sample = self._sample, sample(params)
        if len(before) != len(self._sample):
            return math.nan
        moved = sum((new - old) * (new - old) for new, old in zip(self._sample, before, strict=True))
        size = sum(old * old for old in before)
        return math.sqrt(moved / size) if size else 0.0

    def _flag(self, record: Record) -> None:
        """Note in the record which of its numbers are far from usual."""
        numbers = {"loss": record.loss, "update_ratio": record.update_ratio}
        if hasattr(self.optimizer, "last_grad_sq"):  # of the mean, and there where no gradient is left
            numbers["grad_norm"] = math.sqrt(record.grad_sq)
        elif not math.isnan(record.grad_norm):
            numbers["grad_norm"] = record.grad_norm
        record.drift.update(self._drift.flags(numbers))

    def _look_at_parameters(self) -> tuple[float, float, dict[str, str]]:
        """Their norm, how far they have moved, and the digests of parameters and buffers, if these are watched."""
        with self.gathered():
            params = self.parameters()
            named = [*params.items(), *self.model.named_buffers()] if "digests" in self.watch else []
            digests = {name: digest(t) for name, t in named}
            return norm_of(params.values()), self._moved(params.values()), digests

    def parameters(self) -> dict[str, Tensor]:
        """Every parameter by name, whole, on every rank. All ranks call it together."""
        with torch.no_grad():
            return dict(self.full_parameters(self.model))
