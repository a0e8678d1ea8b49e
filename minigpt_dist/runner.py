"""One rank's run: the pieces it is given, wired into the loop.

Owns which callable is handed to the loop for what, the rank's random streams, and what a checkpoint holds. Leaves the choice of pieces
to `worker.py` (this package's own) and to the judge (another implementation's): it imports none.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from minigpt_dist.batches import read_batch
from minigpt_dist.cadence import Cadence
from minigpt_dist.config import ModelConfig, TrainConfig
from minigpt_dist.guard import Guard
from minigpt_dist.loop import Guard as Guarding
from minigpt_dist.loop import Unguarded, one_by_one, train
from minigpt_dist.loss import next_token_loss
from minigpt_dist.memory import baseline
from minigpt_dist.parallel.collectives import world
from minigpt_dist.parallel.mesh import coordinates_of
from minigpt_dist.parts import Parts
from minigpt_dist.recorder import ALL, Recorder, whole_parameters
from minigpt_dist.rescue import Rescue, place, whole_gradients
from minigpt_dist.trace import Record, state_digests, to_line

State = dict[str, Any]


@dataclass(frozen=True)
class Pieces:
    """The callables a run is made of. Another implementation is plugged in by replacing them (`verify/contract.py`)."""

    model: Callable[[ModelConfig], nn.Module]
    corpus: Callable[[TrainConfig], Tensor]
    broadcast: Callable[[nn.Module], object]
    optimizer: Callable[[nn.Module, TrainConfig, int, int], Any]
    save: Callable[[State, Path, int, TrainConfig], object]
    load: Callable[
        ..., State
    ]  # of (folder, world size, rank), and the `parts` that the rank is to hold, where they are known
    forward: Callable[[nn.Module, Tensor], Tensor] = lambda model, ids: model(
        ids
    )  # through a data-parallel wrapper, if any
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor] = lambda model, out, targets: next_token_loss(
        out, targets
    )  # of what forward returned
    after_backward: Callable[[nn.Module], object] = lambda model: None  # its finish call, where hooks do not do it all
    full_parameters: Callable[[nn.Module], Iterable[tuple[str, Tensor]]] = (
        whole_parameters  # collected, where they are sharded
    )
    gathered: Callable[[Any], AbstractContextManager[object]] = (
        nullcontext  # of the optimizer: a model that can be read and loaded inside
    )
    accumulating: Callable[[Any], AbstractContextManager[object]] = (
        nullcontext  # of the optimizer: all backwards of a step but the last run inside
    )
    parts: Callable[[nn.Module, Any], Parts] | None = (
        None  # of model and optimizer: what a rank holds, for checkpoints that go on at other layouts
    )
    gradients: Callable[[nn.Module, Any], Iterable[Tensor]] = lambda model, optimizer: whole_gradients(
        model
    )  # what a rank holds of them
    add_gradients: Callable[..., list[float]] = one_by_one  # forward and backward of a step's micro-batches


def capture(step: int, model: nn.Module, optimizer: Any) -> State:
    """Everything a rank must have again to go on: model, optimizer shard, position, random stream."""
    return {
        "step": step,
        "model": {name: t.detach().clone() for name, t in model.state_dict().items()},
        "optimizer": optimizer.state_dict(),
        "rng": torch.get_rng_state(),
    }


def restore_state(state: State, model: nn.Module, optimizer: Any) -> int:
    """The inverse of `capture`; the step the state was taken at."""
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    if state.get("rng") is not None:
        torch.set_rng_state(state["rng"])
    return int(state["step"])


@dataclass
class Worker:
    """One rank's run. `folder` receives checkpoints and the live metrics; `resume` continues from the latest checkpoint of `source`
    (default: of `folder`)."""

    config: TrainConfig
    folder: Path
    pieces: Pieces
    resume: bool = False
    watch: frozenset[str] = ALL
    device: str = "cpu"
    source: Path | None = None
    rescue: Rescue | None = field(default=None, init=False)
    skipped: list[int] = field(default_factory=list, init=False)  # batches that the guard passes over
    saved: int = field(default=0, init=False)  # the step of the newest checkpoint of this run

    def run(self) -> dict[str, Any]:
        """Train; plain data for the parent: {"records": [...], "snapshot": path -> digest at the checkpoint step}."""
        config, (N, rank) = self.config, world()
        if config.world_size != N:
            raise ValueError(f"world_size is {config.world_size}, but should be {N}, the number of ranks started")
        self.rank, self.snapshot = rank, dict[str, str]()
        self.replica = coordinates_of(config.layout, rank).dp  # ranks of one replica read the same data
        # Ranks start from different seeds on purpose: only the broadcast can make them equal.
        torch.manual_seed(config.seed * 1009 + rank + (500_009 if self.resume else 0))
        model = self.pieces.model(config.model).to(self.device, getattr(torch, config.dtype))
        self.model = model
        self.corpus = self.pieces.corpus(config).to(self.device)
        if config.guard != "off":  # made before memory is counted
            guard = Guard(config.spike, config.max_rollbacks, config.guard)
            self.rescue = Rescue(guard, self._go_back, self.skipped)
        train(
            model,
            config.steps,
            broadcast=self.pieces.broadcast,
            make_optimizer=self._make_optimizer,
            restore=self._restore,
            batches=self._batches,
            loss_of=self._forward,
            backward=self._backward,
            save=self._save,
            observe=self._observe,
            add_gradients=self._add_gradients,
            guard=self._guard,
        )
        incidents = [] if self.rescue is None else [str(incident) for incident in self.rescue.guard.incidents]
        records = [vars(record) for record in self.recorder.records]
        return {"records": records, "snapshot": self.snapshot, "saved": self.saved, "incidents": incidents}

    def _make_optimizer(self, model: nn.Module) -> Any:
        self.known = baseline() if "bytes" in self.watch else []
        return self.pieces.optimizer(model, self.config, self.config.world_size, self.rank)

    def _restore(self, model: nn.Module, optimizer: Any) -> int:
        if not self.resume:
            return 0
        return self._put_back(self.source or self.folder, model, optimizer)

    def _put_back(self, source: Path, model: nn.Module, optimizer: Any) -> int:
        """Restore the newest checkpoint in `source`, and what its data had passed over by then; the step it was taken at."""
        held = {} if self.pieces.parts is None else {"parts": self.pieces.parts(model, optimizer)}
        state = self.pieces.load(source, self.config.world_size, self.rank, **held)
        self.skipped[:] = sorted({*self.skipped, *state.get("skipped", [])})
        with self.pieces.gathered(optimizer):
            return restore_state(state, model, optimizer)

    def _batches(self, step: int) -> Iterator[tuple[Tensor, Tensor]]:
        """This rank's micro-batches of one step. Dropout's stream is a function of seed, step and place in the global batch."""
        for m in range(self.config.micro_batches):
            if self.config.model.dropout:
                seat = self.replica * self.config.micro_batches + m
                torch.manual_seed((self.config.seed * 1_000_003 + step) * 4099 + seat)
            x, y = read_batch(self.corpus, self.config, place(step, self.skipped) - 1, self.replica, m)
            self.recorder.batch(x)
            self._last = m == self.config.micro_batches - 1
            yield x, y

    def _forward(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        began = time.perf_counter()
        loss = self.pieces.loss(model, self.pieces.forward(model, x), y)
        self.recorder.computed("F", began, time.perf_counter())
        return loss

    def _backward(self, loss: Tensor, optimizer: Any) -> None:
        began = time.perf_counter()
        with nullcontext() if self._last else self.pieces.accumulating(optimizer):
            scaler = getattr(optimizer, "scaler", None)
            loss = loss if scaler is None else scaler.scaled(loss)
            if self.config.reduction == "exact":
                loss.backward()
                optimizer.fold()
            else:
                (loss / self.config.micro_batches).backward()
        self.pieces.after_backward(self.model)
        self.recorder.computed("B", began, time.perf_counter())

    def _add_gradients(self, model: nn.Module, *rest: Any) -> list[float]:
        losses = self.pieces.add_gradients(model, *rest)
        for span in getattr(model, "spans", ()):  # of a pipeline's stages
            self.recorder.computed(str(span.action), span.start, span.end)
        return losses

    def _save(self, step: int, model: nn.Module, optimizer: Any) -> None:
        due = self.cadence.due(step)
        if step != self.config.checkpoint_step and not due:
            return
        self.snapshot, self.saved = state_digests(self._write(step, model, optimizer)), step
        if (
            self.config.tp * self.config.pp > 1
        ):  # the state has this rank's part of the parameters, a record all of them
            self.snapshot |= {f"model.{name}": value for name, value in self.recorder.records[-1].params.items()}

    def _write(self, step: int, model: nn.Module, optimizer: Any) -> State:
        """Write a checkpoint of this run; the state that it holds."""
        with self.pieces.gathered(optimizer):
            state = capture(step, model, optimizer)
        if self.skipped:
            state["skipped"] = list(self.skipped)
        held = {} if self.pieces.parts is None else {"parts": self.pieces.parts(model, optimizer).to_plain()}
        self.pieces.save({**state, **held}, self.folder, step, self.config)
        return state

    def _guard(self, model: nn.Module, optimizer: Any) -> Guarding:
        self.cadence = Cadence(self.config.checkpoint_every, self.config.checkpoint_minutes)
        if self.rescue is None:
            return Unguarded()
        self.rescue.gradients = lambda model: self.pieces.gradients(model, optimizer)
        self._write(self.recorder.records[0].step, model, optimizer)
        return self.rescue

    def _go_back(self, model: nn.Module, optimizer: Any) -> int:
        """Restore the newest checkpoint of this run, and forget what was recorded since; its step."""
        step = self._put_back(self.folder, model, optimizer)
        self.recorder.rewind(step)
        return step

    def _observe(self, model: nn.Module, optimizer: Any) -> Recorder:
        self.recorder = Recorder(
            model,
            optimizer,
            self.rank,
            watch=self.watch,
            known_storages=self.known,
            last_step=self.config.steps,
            on_record=self._log,
            full_parameters=self.pieces.full_parameters,
            gathered=partial(self.pieces.gathered, optimizer),
        )
        return self.recorder

    def _log(self, record: Record) -> None:
        """Append the record to this rank's live metrics file: one writer a file, readable after a kill at any point."""
        with (self.folder / f"metrics-rank{self.rank}.jsonl").open("a", encoding="utf-8") as file:
            file.write(to_line(record) + "\n")
