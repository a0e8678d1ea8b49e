"""A run under the magnifying glass: a worker that keeps every tensor, and the one process that works out what each step should have given.

Owns the bodies that ranks run, and the evidence they bring (`Run`, `Recomputed`). Leaves comparing to `locate.py`.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from minigpt_dist.batches import read_batch
from minigpt_dist.config import TrainConfig
from minigpt_dist.corpus import make_corpus
from minigpt_dist.recorder import Recorder
from minigpt_dist.runner import Pieces, Worker
from minigpt_dist.verify.capture import Capture, Shot, copied, leaves_of, named_tensors, recompute
from minigpt_dist.verify.contract import resolve
from minigpt_dist.verify.optimizers import abilities
from minigpt_dist.verify.plug import build_model, pieces_of
from minigpt_dist.verify.subject import Subject

Parts = dict[str, dict[str, Tensor]]


@dataclass
class Run:
    """What a run showed, with its tensors. `shots`: (step, rank) -> Shot; `resumed`: the same of a run from the checkpoint on."""

    config: TrainConfig
    shots: dict[tuple[int, int], Shot]
    resumed: dict[tuple[int, int], Shot] = field(default_factory=dict)

    @property
    def steps(self) -> list[int]:
        """Completed updates at each shot, ascending."""
        return sorted({step for step, _ in self.shots})

    @property
    def ranks(self) -> range:
        return range(self.config.world_size)


class Observer(Recorder):
    """The worker's recorder, which also feeds a Capture."""

    capture: Capture
    from_checkpoint = False

    def started(self, step: int) -> None:
        super().started(step)
        self.capture.started(step, self.model, self.optimizer, self.from_checkpoint)

    def backward_done(self, step: int) -> None:
        super().backward_done(step)
        self.capture.backward_done(self.model)

    def updated(self, step: int, losses: list[float]) -> None:
        super().updated(step, losses)
        self.capture.updated(step, self.model, self.optimizer, losses)


class ObservedWorker(Worker):
    """A worker of any pieces whose run is captured in `capture`."""

    def observe(self, rank: int) -> Capture:
        """Wrap the pieces so that `capture` sees what passes through them; call before `run`."""
        self.capture = capture = Capture(rank)
        theirs = self.pieces

        def save(state: dict[str, Any], folder: Path, step: int, config: TrainConfig) -> object:
            capture.saving(state)
            done = theirs.save(state, folder, step, config)
            capture.saved(self.recorder.model, self.recorder.optimizer)
            return done

        def load(folder: Path, world_size: int, rank: int, **held: Any) -> dict[str, Any]:
            state = theirs.load(folder, world_size, rank, **held)
            capture.note("loaded", dict(leaves_of(state)))
            return state

        self.pieces = replace(
            theirs,
            model=lambda sizes: capture.watch(theirs.model(sizes)),
            forward=lambda model, ids: capture.forward(theirs.forward(model, ids)),
            save=save,
            load=load,
        )
        return capture

    def _batches(self, step: int) -> Iterator[tuple[Tensor, Tensor]]:
        for x, y in super()._batches(step):
            self.capture.batch(x, y)
            yield x, y

    def _observe(self, model: nn.Module, optimizer: Any) -> Recorder:
        self.capture.watch(model)
        self.recorder = Observer(model, optimizer, self.rank, watch=self.watch)
        self.recorder.capture, self.recorder.from_checkpoint = self.capture, self.resume
        return self.recorder


@dataclass
class Recomputed:
    """What one process gives, with the implementation's model and the judge's data.

    initial: parameters of rank 0's seed. parts: (step, rank) -> logits, losses and gradients at what that rank held before
    the step. dtype: the rounding that is allowed, if it is not that of the configuration.
    """

    initial: dict[str, Tensor]
    parts: dict[tuple[int, int], Parts]
    dtype: str | None = None


def captured(pieces: Pieces, config: TrainConfig, folder: Path, rank: int, resume: bool = False) -> list[Shot]:
    """On a rank: run a worker of `pieces` and return its shots."""
    worker = ObservedWorker(config, folder, pieces, resume=resume, watch=frozenset())
    capture = worker.observe(rank)
    worker.run()
    return capture.shots


def observed_body(spec: str, slots: list[str], config: dict[str, Any], folder: str, resume: bool) -> dict[str, Any]:
    """What a rank runs: its shots as plain data, and whether a resume can be asked for."""
    impl = resolve(spec, tuple(slots))
    rank = torch.distributed.get_rank()
    shots = captured(pieces_of(impl), TrainConfig.from_dict(config), Path(folder), rank, resume)
    return {"shots": [vars(shot) for shot in shots], "resumable": "state_dict" in abilities(impl)}


def recompute_body(
    spec: str, slots: list[str], config: dict[str, Any], asked: Sequence[tuple[int, int, dict[str, Tensor]]]
) -> list[Parts]:
    """In one process: the parameters of rank 0's seed; then the model's answers at the parameters that each (step, rank) started from."""
    c, impl = TrainConfig.from_dict(config), resolve(spec, tuple(slots))
    torch.manual_seed(c.seed * 1009)  # after the import, which may set a seed of its own
    model = build_model(impl, c.model).to(getattr(torch, c.dtype))
    tokens, initial = judged_corpus(c), {name: copied(t) for name, t in named_tensors(model).items()}
    return [
        {"initial": initial},
        *(recompute(model, params, batches_of(c, tokens, step, rank)) for step, rank, params in asked),
    ]


def judged_corpus(config: TrainConfig) -> Tensor:
    """The tokens that every implementation is trained on."""
    return make_corpus(config.seed, config.total_tokens, config.model.vocab)


def batches_of(config: TrainConfig, tokens: Tensor, step: int, rank: int) -> list[tuple[Tensor, Tensor, int | None]]:
    """Inputs, targets and dropout's seed of each micro-batch that `rank` has to read for update number `step`."""
    made = []
    for m in range(config.micro_batches):
        place = rank * config.micro_batches + m
        seed = (config.seed * 1_000_003 + step) * 4099 + place if config.model.dropout else None
        made.append((*read_batch(tokens, config, step - 1, rank, m), seed))
    return made


def indexed(per_rank: Sequence[Mapping[str, Any]]) -> dict[tuple[int, int], Shot]:
    """(step, rank) -> Shot, from what each rank returned."""
    return {(shot["step"], shot["rank"]): Shot(**shot) for result in per_rank for shot in result["shots"]}


def observe(subject: Subject, config: TrainConfig) -> Run:
    """Run `subject` (once a configuration) with all tensors kept; and, if there is a checkpoint, again from it in fresh processes."""
    return subject.evidence(("observed", str(config)), lambda: _observe(subject, config))  # type: ignore[no-any-return]  # memo


def _observe(subject: Subject, config: TrainConfig) -> Run:
    folder = tempfile.mkdtemp(prefix="minigpt-dist-")
    try:
        N, plain = config.world_size, config.to_dict()
        whole = subject.run(observed_body, N, plain, folder, False)
        run = Run(config, indexed(whole))
        if 0 < config.checkpoint_step < config.steps and all(result["resumable"] for result in whole):
            run.resumed = indexed(subject.run(observed_body, N, plain, folder, True))
        return run
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def recomputed(subject: Subject, run: Run) -> Recomputed:
    """What the model gives, in one process, at what each rank held before each step."""
    asked = [(step, rank) for step in run.steps[1:] for rank in run.ranks]
    rows = [(step, rank, run.shots[step - 1, rank].get("params")) for step, rank in asked]
    first, *found = subject.run(recompute_body, 1, run.config.to_dict(), rows)[0]
    return Recomputed(first["initial"], dict(zip(asked, found, strict=True)))
