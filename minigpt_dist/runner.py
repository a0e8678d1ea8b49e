"""One rank's run: the pieces it is given, wired into the loop.

Owns which callable is handed to the loop for what, the rank's random streams, and what a checkpoint holds. Leaves the choice of pieces
to `worker.py` (this package's own) and to the judge (another implementation's): it imports none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from minigpt_dist.batches import read_batch
from minigpt_dist.config import ModelConfig, TrainConfig
from minigpt_dist.loop import train
from minigpt_dist.loss import next_token_loss
from minigpt_dist.memory import baseline
from minigpt_dist.parallel.collectives import world
from minigpt_dist.recorder import ALL, Recorder, whole_parameters
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
    load: Callable[[Path, int, int], State]
    forward: Callable[[nn.Module, Tensor], Tensor] = lambda model, ids: model(
        ids
    )  # through a data-parallel wrapper, if any
    after_backward: Callable[[nn.Module], object] = lambda model: None  # its finish call, where hooks do not do it all
    full_parameters: Callable[[nn.Module], Iterable[tuple[str, Tensor]]] = (
        whole_parameters  # collected, where they are sharded
    )


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

    def run(self) -> dict[str, Any]:
        """Train; plain data for the parent: {"records": [...], "snapshot": path -> digest at the checkpoint step}."""
        config, (N, rank) = self.config, world()
        if config.world_size != N:
            raise ValueError(f"world_size is {config.world_size}, but should be {N}, the number of ranks started")
        self.rank, self.snapshot = rank, dict[str, str]()
        # Ranks start from different seeds on purpose: only the broadcast can make them equal.
        torch.manual_seed(config.seed * 1009 + rank + (500_009 if self.resume else 0))
        model = self.pieces.model(config.model).to(self.device, getattr(torch, config.dtype))
        self.model = model
        self.corpus = self.pieces.corpus(config).to(self.device)
        train(
            model,
            config.steps,
            broadcast=self.pieces.broadcast,
            make_optimizer=self._make_optimizer,
            restore=self._restore,
            batches=self._batches,
            loss_of=lambda model, x, y: next_token_loss(self.pieces.forward(model, x), y),
            backward=self._backward,
            save=self._save,
            observe=self._observe,
        )
        return {"records": [vars(record) for record in self.recorder.records], "snapshot": self.snapshot}

    def _make_optimizer(self, model: nn.Module) -> Any:
        self.known = baseline() if "bytes" in self.watch else []
        return self.pieces.optimizer(model, self.config, self.config.world_size, self.rank)

    def _restore(self, model: nn.Module, optimizer: Any) -> int:
        if not self.resume:
            return 0
        return restore_state(
            self.pieces.load(self.source or self.folder, self.config.world_size, self.rank), model, optimizer
        )

    def _batches(self, step: int) -> Iterator[tuple[Tensor, Tensor]]:
        """This rank's micro-batches of one step. Dropout's stream is a function of seed, step and place in the global batch."""
        for m in range(self.config.micro_batches):
            if self.config.model.dropout:
                place = self.rank * self.config.micro_batches + m
                torch.manual_seed((self.config.seed * 1_000_003 + step) * 4099 + place)
            x, y = read_batch(self.corpus, self.config, step - 1, self.rank, m)
            self.recorder.batch(x)
            yield x, y

    def _backward(self, loss: Tensor, optimizer: Any) -> None:
        if self.config.reduction == "exact":
            loss.backward()
            optimizer.fold()
        else:
            (loss / self.config.micro_batches).backward()
        self.pieces.after_backward(self.model)

    def _save(self, step: int, model: nn.Module, optimizer: Any) -> None:
        if step == self.config.checkpoint_step:
            state = capture(step, model, optimizer)
            self.snapshot = state_digests(state)
            self.pieces.save(state, self.folder, step, self.config)

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
        )
        return self.recorder

    def _log(self, record: Record) -> None:
        """Append the record to this rank's live metrics file: one writer a file, readable after a kill at any point."""
        with (self.folder / f"metrics-rank{self.rank}.jsonl").open("a", encoding="utf-8") as file:
            file.write(to_line(record) + "\n")
