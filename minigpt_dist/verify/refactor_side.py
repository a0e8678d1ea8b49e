"""One rank of one side of a refactor check: the lesson's loop over an implementation, every tensor kept.

Owns the order of a run: broadcast, train with a save, go on from the save with a model of another seed. It imports nothing of
the package, which here is the side's own: `refactor_driver.py` loads this file by path. It relies on the lesson's names
only: `MiniGPT`, `broadcast_parameters`, `ZeroOptimizer`, and, where they are there, `make_corpus`, `save_sharded`,
`load_sharded`. Leaves processes to the driver.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Unsupported(Exception):  # noqa: N818 - what it says is no error: the case cannot be put to this implementation
    """The implementation takes no such option."""


def accepted(function: Callable[..., Any], options: dict[str, Any]) -> dict[str, Any]:
    """The part of `options` that `function`, or the constructor of a class, takes by name."""
    parameters = inspect.signature(function).parameters.values()
    names = {p.name for p in parameters}
    anything = any(p.kind is p.VAR_KEYWORD for p in parameters)
    return {name: value for name, value in options.items() if anything or name in names}


def require(function: Callable[..., Any], options: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """What `function` takes of `options`. Unsupported if it does not take one that is not at its default."""
    taken = accepted(function, options)
    for name, value in options.items():
        if name not in taken and value != defaults.get(name):
            raise Unsupported(f"{getattr(function, '__name__', function)} takes no {name}")
    return taken


class Side:
    """The implementation, and the case it is put to on this rank."""

    def __init__(self, implementation: Any, capture: Any, case: dict[str, Any], rank: int, folder: Path) -> None:
        self.impl, self.capture, self.case, self.rank, self.folder = implementation, capture, case, rank, folder
        self.config = case["config"]
        self.tokens = torch.tensor(case["tokens"])

    def build(self) -> nn.Module:
        """The model, at the case's sizes."""
        sizes = require(self.impl.MiniGPT, self.config["model"], self.case["defaults"])
        model: nn.Module = self.impl.MiniGPT(**sizes)
        return model

    def optimizer(self, model: nn.Module) -> Any:
        """The optimizer, with the case's options."""
        c, build = self.config, self.impl.ZeroOptimizer
        options = {name: c[name] for name in ("lr", "eps", "weight_decay", "reduction")}
        options |= {"betas": tuple(c["betas"]), "world_size": c["world_size"], "rank": self.rank}
        return build(model, **require(build, options, self.case["defaults"]))

    def batch(self, step: int, rank: int, m: int) -> tuple[Tensor, Tensor, int | None]:
        """Inputs, targets (B, S) and dropout's seed: blocks are numbered by their place in the global batch."""
        c, S = self.config, self.config["model"]["seq_len"]
        place = rank * c["micro_batches"] + m
        width = c["batch"] * S + 1
        start = ((step - 1) * c["world_size"] * c["micro_batches"] + place) * width
        block = self.tokens[start : start + width]
        seed = (c["seed"] * 1_000_003 + step) * 4099 + place if c["model"]["dropout"] else None
        return block[:-1].view(-1, S), block[1:].view(-1, S), seed

    def seeded(self, shift: int) -> nn.Module:
        """A model from a seed of this rank's own, in the case's type."""
        torch.manual_seed(self.config["seed"] * 1009 + self.rank + shift)
        return self.build().to(getattr(torch, self.config["dtype"]))

    def run(self) -> None:
        """Train with a save, then once more from what was saved."""
        watcher = self.capture.Capture(self.rank)
        model = self.seeded(0)
        watcher.watch(model)
        self.impl.broadcast_parameters(model)
        optimizer = self.optimizer(model)
        self.corpus(watcher)
        watcher.started(0, model, optimizer)
        self.train(model, optimizer, watcher, 0, save=True)
        self.capture.write_shots(self.folder / f"rank{self.rank}.safetensors", watcher.shots)
        if self.saves(optimizer):
            self.resume()

    def saves(self, optimizer: Any) -> bool:
        """Can a checkpoint be asked for?"""
        names = ("save_sharded", "load_sharded")
        return (
            bool(self.config["checkpoint_step"])
            and all(hasattr(self.impl, n) for n in names)
            and hasattr(optimizer, "state_dict")
        )

    def corpus(self, watcher: Any) -> None:
        make = getattr(self.impl, "make_corpus", None)
        if make is not None:
            vocab = self.config["model"]["vocab"]
            made = make(self.config["seed"], len(self.tokens), **accepted(make, {"vocab": vocab, "vocab_size": vocab}))
            watcher.note("corpus", {"tokens": made})

    def train(self, model: nn.Module, optimizer: Any, watcher: Any, done: int, save: bool) -> None:
        """From `done` completed updates to the last."""
        c = self.config
        exact = c["reduction"] == "exact"
        for step in range(done + 1, c["steps"] + 1):
            optimizer.zero_grad()
            losses = []
            for m in range(c["micro_batches"]):
                x, y, seed = self.batch(step, self.rank, m)
                if seed is not None:
                    torch.manual_seed(seed)
                watcher.batch(x, y)
                logits = watcher.forward(model(x))
                loss = nn.functional.cross_entropy(logits.view(-1, logits.shape[-1]), y.reshape(-1))
                (loss if exact else loss / c["micro_batches"]).backward()
                if exact:
                    optimizer.fold()
                losses.append(loss.item())
            watcher.backward_done(model)
            optimizer.step()
            watcher.updated(step, model, optimizer, losses)
            if save and step == c["checkpoint_step"] and self.saves(optimizer):
                self.save(step, model, optimizer, watcher)

    def save(self, step: int, model: nn.Module, optimizer: Any, watcher: Any) -> None:
        weights = {name: t.detach().clone() for name, t in model.state_dict().items()}
        state = {"step": step, "model": weights, "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()}
        watcher.saving(state)
        N = self.config["world_size"]
        states: list[Any] | None = [None] * N if self.rank == 0 else None
        dist.gather_object(state, states)  # between the ranks of one run of one side; nothing is unpickled from disk
        if self.rank == 0:
            self.impl.save_sharded(states, str(self.folder / "checkpoint"), step)
        dist.barrier()
        watcher.saved(model, optimizer)

    def resume(self) -> None:
        """A new model of another seed goes on from the checkpoint."""
        loaded = self.impl.load_sharded(str(self.folder / "checkpoint"), self.config["world_size"])
        if isinstance(loaded, tuple):
            loaded = next(part for part in loaded if isinstance(part, list))
        state, watcher = loaded[self.rank], self.capture.Capture(self.rank)
        watcher.note("loaded", dict(self.capture.leaves_of(state)))
        model = watcher.watch(self.seeded(500_009))
        self.impl.broadcast_parameters(model)
        optimizer = self.optimizer(model)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"])
        watcher.started(int(state["step"]), model, optimizer, True)
        self.train(model, optimizer, watcher, int(state["step"]), save=False)
        self.capture.write_shots(self.folder / f"rank{self.rank}-resumed.safetensors", watcher.shots)

    def recompute(self) -> None:
        """In one process: what the model gives at what each rank held before each step, and what rank 0 was seeded with."""
        model, c = self.seeded(0), self.config
        made = [self.capture.Shot(0, 0)]
        made[0].put("params", self.capture.named_tensors(model))
        for rank in range(c["world_size"]):
            shots = self.capture.read_shots(self.folder / f"rank{rank}.safetensors")
            for before, after in itertools.pairwise(shots):
                batches = [self.batch(after.step, rank, m) for m in range(c["micro_batches"])]
                made.append(
                    self.capture.Shot(after.step, rank, self.capture.recompute(model, before.get("params"), batches))
                )
        self.capture.write_shots(self.folder / "oracle.safetensors", made)
