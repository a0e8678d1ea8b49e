"""What a rank does in the composed run: train with a checkpoint, go on from one, and answer for its model; plain data comes back.

Owns the rank's side. Leaves the evidence to `composition.py`.
"""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from minigpt_dist.config import TrainConfig
from minigpt_dist.memory import held
from minigpt_dist.parallel.collectives import barrier, world
from minigpt_dist.runner import Pieces, Worker
from minigpt_dist.trace import leaves, tensor_bytes
from minigpt_dist.verify.checkpoint_files import Files, files_below, put_files
from minigpt_dist.verify.contract import Implementation, resolve
from minigpt_dist.verify.optimizers import abilities
from minigpt_dist.verify.plug import WRAPPED, build_model, pieces_of

MOMENT_WORDS = ("exp_avg", "moment", "first", "second", "momentum")


def composed_body(
    spec: str, slots: list[str], config: dict[str, Any], tokens: Tensor, folder: str, files: Files | None
) -> dict[str, Any]:
    """One rank of the composed run, from the beginning, or from the checkpoint in `files`.

    Besides the records: the final parameters as bytes, and what lies in the folder at the end.
    """
    impl = resolve(spec, tuple(slots))
    result = run_with(_pieces(impl, tokens), config, folder, files)
    known = "pieces" in impl.extras  # a peer's, whose traits say the same
    result["averages_outside"], result["resumable"] = (
        not known and impl.averages_outside,
        known or "state_dict" in abilities(impl),
    )
    result["state"] = result["state"] if known else 0
    wrapped = None if known else impl.extras.get(WRAPPED)
    result["buckets"] = 0 if wrapped is None or wrapped.wrapper is None else wrapped.bytes_of_buckets()
    return result


def run_with(pieces: Pieces, config: dict[str, Any], folder: str, files: Files | None) -> dict[str, Any]:
    """One rank's run of these pieces: its records, the final parameters, the bytes of its optimizer's state, the files it left."""
    with shared_folder(Path(folder), files) as place:
        worker = Worker(TrainConfig.from_dict(config), place, pieces, resume=files is not None)
        result = worker.run()
        barrier()  # every rank's files are written
        result["files"] = files_below(place) if world()[1] == 0 and files is None else []
    final = worker.recorder.parameters()
    result["final"] = {name: tensor_bytes(p) for name, p in final.items()}
    result["shapes"] = {name: list(p.shape) for name, p in final.items()}
    state = leaves(worker.recorder.optimizer.state_dict())
    result["state"] = held(t for _, t in state if isinstance(t, Tensor))
    return result


def _pieces(impl: Implementation, tokens: Tensor) -> Pieces:
    """The implementation's pieces over the judge's data.

    What its own corpus gives is judged apart: one with nothing to learn must not decide whether the composition's loss falls.
    """
    return replace(pieces_of(impl), corpus=lambda config: tokens)


def altered_body(spec: str, slots: list[str], config: dict[str, Any], folder: str, files: Files) -> dict[str, Any]:
    """Load the checkpoint in `files` on every rank, change one moment of the first rank that has one, save it elsewhere.

    {"files": the new checkpoint, on rank 0} and "altered": the path of what this rank changed, or None.
    """
    c, pieces, (N, rank) = TrainConfig.from_dict(config), pieces_of(resolve(spec, tuple(slots))), world()
    with shared_folder(Path(folder), files) as place:
        state = pieces.load(place, N, rank)
        changed = _change_moment(state["optimizer"]) if rank == 0 else None
        target = place / "altered"
        if rank == 0:
            target.mkdir()
        barrier()
        pieces.save(state, target, c.checkpoint_step, c)
        barrier()
        return {"altered": changed, "files": files_below(target) if rank == 0 else []}


def _change_moment(optimizer: Any) -> str | None:
    """Double every element, and add one to it, of the first moment found in an optimizer's state; its path."""
    tensors = [
        (path, t) for path, t in leaves(optimizer) if isinstance(t, Tensor) and t.is_floating_point() and t.numel()
    ]
    named = [(path, t) for path, t in tensors if any(word in path.lower() for word in MOMENT_WORDS)]
    for path, t in named or [(path, t) for path, t in tensors if t.numel() > 1][-1:]:
        with torch.no_grad():
            t.mul_(2).add_(1)
        return path
    return None


def initial_body(spec: str, slots: list[str], config: dict[str, Any]) -> dict[str, Any]:
    """The parameters and buffers that the model has from rank 0's seed."""
    return initial_of(_model(spec, slots, config))


def initial_of(model: nn.Module) -> dict[str, Any]:
    """Copies of a model's parameters and buffers, by name."""
    return {"parameters": _copies(model.named_parameters()), "buffers": _copies(model.named_buffers())}


def gradients_body(
    spec: str,
    slots: list[str],
    config: dict[str, Any],
    parameters: dict[str, Tensor],
    blocks: list[tuple[Tensor, Tensor]],
) -> list[tuple[float, dict[str, Tensor]]]:
    """`gradients_of` the implementation's model."""
    model = _kept_model(spec, tuple(slots), json.dumps(config))
    return gradients_of(model, config["micro_batches"], parameters, blocks)


def gradients_of(
    model: nn.Module, micro_batches: int, parameters: dict[str, Tensor], blocks: list[tuple[Tensor, Tensor]]
) -> list[tuple[float, dict[str, Tensor]]]:
    """For each block of inputs and targets, each (B, S): the model's loss at `parameters`, and the gradient of its 1/micro_batches."""
    named = dict(model.named_parameters())
    with torch.no_grad():
        for name, p in named.items():
            p.copy_(parameters[name])
    answers = []
    for x, y in blocks:
        loss = nn.functional.cross_entropy(model(x).view(y.numel(), -1), y.flatten())
        grads = torch.autograd.grad(
            loss / micro_batches, list(named.values()), allow_unused=True, materialize_grads=True
        )
        answers.append((loss.item(), dict(zip(named, grads, strict=True))))
    return answers


def _model(spec: str, slots: list[str], config: dict[str, Any]) -> nn.Module:
    c, impl = TrainConfig.from_dict(config), resolve(spec, tuple(slots))
    torch.manual_seed(c.seed * 1009)  # after the import, which may set a seed of its own
    return build_model(impl, c.model).to(getattr(torch, c.dtype))


@functools.lru_cache(maxsize=1)
def _kept_model(spec: str, slots: tuple[str, ...], config: str) -> nn.Module:
    """One model for all steps of an oracle, as in the run itself."""
    return _model(spec, list(slots), json.loads(config))


def _copies(named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    return {name: t.detach().clone() for name, t in named}


@contextmanager
def shared_folder(folder: Path, files: Files | None) -> Iterator[Path]:
    """A folder of all ranks that holds `files`, from when rank 0 has put them there until every rank is done with it."""
    if world()[1] == 0:
        folder.mkdir(parents=True, exist_ok=True)
        put_files(files or [], folder)
    barrier()
    yield folder
    barrier()
    if world()[1] == 0:
        shutil.rmtree(folder, ignore_errors=True)
