"""What one rank of a run showed, as tensors: tokens, logits, gradients, optimizer state, parameters, step by step.

Owns taking the copies, their names, and the file they go to. It imports nothing of the package, because the refactor check loads
this one file beside another revision of it. Leaves comparing to `locate.py`.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

# The kinds of tensor in the order in which a step makes them. `grads` is what backward itself gave, added over
# micro-batches, before any hook of the implementation; `held` is p.grad when step() is called; `asked` is a second answer
# of state_dict(), where it is not the first. `saved` and `kept` surround a save: the state handed to it, and what the rank
# holds afterwards. `loaded` is what came back from disk, `resumed` what the rank holds once it is restored.
KINDS = (
    "corpus",
    "loaded",
    "resumed",
    "inputs",
    "targets",
    "logits",
    "loss",
    "grads",
    "held",
    "state",
    "asked",
    "params",
    "saved",
    "kept",
)


@dataclass
class Shot:
    """One rank after `step` completed updates: kind -> name -> tensor, all copies on the CPU, names in the order they were met."""

    step: int
    rank: int
    parts: dict[str, dict[str, Tensor]] = field(default_factory=dict)

    def put(self, kind: str, tensors: Mapping[str, Tensor]) -> None:
        """Add copies of `tensors` under `kind`."""
        self.parts.setdefault(kind, {}).update({name: copied(t) for name, t in tensors.items()})

    def get(self, kind: str) -> dict[str, Tensor]:
        """The tensors of one kind; none if it was not seen."""
        return self.parts.get(kind, {})


def copied(tensor: Tensor) -> Tensor:
    """A contiguous copy on the CPU that shares no memory with anything."""
    return tensor.detach().to("cpu", copy=True).contiguous()


def leaves_of(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """(path, tensor) of a nested state, keys sorted; numbers as float64 or int64 of no dimension, what is neither left out."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, (bool, int, float)):
        yield path, torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else torch.int64)
    elif isinstance(value, (Mapping, list, tuple)):
        pairs = (
            sorted(value.items(), key=lambda pair: str(pair[0]))
            if isinstance(value, Mapping)
            else list(enumerate(value))
        )
        for key, item in pairs:
            yield from leaves_of(item, f"{path}.{key}" if path else str(key))


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters, then buffers, in declaration order."""
    return dict([*model.named_parameters(), *model.named_buffers()])


def state_of(optimizer: Any) -> dict[str, Tensor]:
    """The tensors and numbers of the optimizer's state_dict; none if it has no such method."""
    ask = getattr(optimizer, "state_dict", None)
    return dict(leaves_of(ask())) if callable(ask) else {}


class Capture:
    """Collects one Shot a step. Told by the loop what happens, in order; changes nothing."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.shots: list[Shot] = []
        self._next = Shot(0, rank)
        self._watched: dict[int, Tensor] = {}  # holds what it has hooked, so that no other tensor gets its id

    def watch(self, model: nn.Module) -> nn.Module:
        """See every gradient that backward gives `model`'s parameters from now on. Call it first when the model is made, so that no
        hook of the implementation comes before, and again where parameters may have been replaced. Returns `model`."""
        for name, p in model.named_parameters():
            if p.requires_grad and id(p) not in self._watched:
                self._watched[id(p)] = p
                p.register_hook(functools.partial(self._backward, name))
        return model

    def _backward(self, name: str, grad: Tensor) -> None:
        grads = self._next.parts.setdefault("grads", {})
        grads[name] = grads[name] + copied(grad) if name in grads else copied(grad)

    def note(self, kind: str, tensors: Mapping[str, Tensor]) -> None:
        """Add tensors to the shot that is being taken."""
        self._next.put(kind, tensors)

    def batch(self, inputs: Tensor, targets: Tensor) -> None:
        """The next micro-batch's token ids."""
        m = str(len(self._next.get("inputs")))
        self.note("inputs", {m: inputs})
        self.note("targets", {m: targets})

    def forward(self, logits: Tensor) -> Tensor:
        """The next micro-batch's logits, which are returned."""
        self.note("logits", {str(len(self._next.get("logits"))): logits})
        return logits

    def started(self, step: int, model: nn.Module, optimizer: Any, resumed: bool = False) -> None:
        """The state before the first step of this run."""
        if resumed:
            self.note(
                "resumed", {**_prefixed("optimizer", state_of(optimizer)), **_prefixed("model", named_tensors(model))}
            )
        self._close(step, model, optimizer)

    def backward_done(self, model: nn.Module) -> None:
        """All backwards of the step are done, and step() has not been called."""
        self.note("held", {name: p.grad for name, p in model.named_parameters() if p.grad is not None})

    def updated(self, step: int, model: nn.Module, optimizer: Any, losses: Sequence[float]) -> None:
        """step() has returned."""
        self.note("loss", {str(m): torch.tensor(loss, dtype=torch.float64) for m, loss in enumerate(losses)})
        self._close(step, model, optimizer)

    def saving(self, state: Any) -> None:
        """A save is about to be given `state`. Belongs to the step just closed."""
        self.shots[-1].put("saved", dict(leaves_of(state)))

    def saved(self, model: nn.Module, optimizer: Any) -> None:
        """The save has returned."""
        self.shots[-1].put(
            "kept", {**_prefixed("optimizer", state_of(optimizer)), **_prefixed("model", named_tensors(model))}
        )

    def _close(self, step: int, model: nn.Module, optimizer: Any) -> None:
        self.note("state", state_of(optimizer))
        again = state_of(optimizer)
        if any(_moved(t, again.get(name)) for name, t in self._next.get("state").items()):
            self.note("asked", again)
        self.note("params", named_tensors(model))
        self._next.step = step
        order = [kind for kind in KINDS if kind in self._next.parts]
        self._next.parts = {kind: self._next.parts[kind] for kind in order}
        declared = list(self._next.get("params"))
        if "grads" in self._next.parts:  # met in the order of backward
            self._next.parts["grads"] = {n: t for n in declared if (t := self._next.parts["grads"].get(n)) is not None}
        self.shots.append(self._next)
        self._next = Shot(step + 1, self.rank)
        self.watch(model)


def _moved(before: Tensor, after: Tensor | None) -> bool:
    """Is it gone, or other than before? NaN counts as itself."""
    return after is None or not torch.equal(torch.nan_to_num(before), torch.nan_to_num(copied(after)))


def _prefixed(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}.{name}": t for name, t in tensors.items()}


def write_shots(path: Path, shots: Sequence[Shot]) -> None:
    """One safetensors file; its metadata holds the order of names, which the format itself does not keep."""
    named = {
        f"{i}/{kind}/{name}": t
        for i, shot in enumerate(shots)
        for kind, part in shot.parts.items()
        for name, t in part.items()
    }
    order = {"shots": json.dumps([[shot.step, shot.rank] for shot in shots]), "names": json.dumps(list(named))}
    save_file(named, str(path), metadata=order)


def read_shots(path: Path) -> list[Shot]:
    """The inverse of `write_shots`. ValueError if the file is not one of these."""
    with safe_open(str(path), framework="pt") as file:
        metadata = file.metadata() or {}
        if not {"shots", "names"} <= set(metadata):
            raise ValueError(f"{path} is without the names of shots, but should be a file of shots")
        shots = [Shot(step, rank) for step, rank in json.loads(metadata["shots"])]
        for key in json.loads(metadata["names"]):
            i, kind, name = key.split("/", 2)
            shots[int(i)].parts.setdefault(kind, {})[name] = file.get_tensor(key)
    return shots


def recompute(
    model: nn.Module, params: Mapping[str, Tensor], batches: Sequence[tuple[Tensor, Tensor, int | None]]
) -> dict[str, dict[str, Tensor]]:
    """Logits, losses and the gradient of their mean that `model` gives at `params`, in one process, with no optimizer near.

    `batches`: (inputs, targets, seed of dropout or None) of each micro-batch. The kinds and names are a Shot's, grads in float64: they
    are added over micro-batches without rounding.
    """
    with torch.no_grad():
        for name, t in named_tensors(model).items():
            t.copy_(params[name])
    names, leaves = zip(*[(n, p) for n, p in model.named_parameters() if p.requires_grad], strict=True)
    shot = Shot(0, 0)
    shot.put("inputs", {str(m): x for m, (x, _, _) in enumerate(batches)})
    shot.put("targets", {str(m): y for m, (_, y, _) in enumerate(batches)})
    total: dict[str, Tensor] = {}
    for m, (x, y, seed) in enumerate(batches):
        if seed is not None:
            torch.manual_seed(seed)
        logits = model(x)
        loss = nn.functional.cross_entropy(logits.view(-1, logits.shape[-1]), y.reshape(-1))
        grads = torch.autograd.grad(loss, leaves, allow_unused=True)
        shot.put("logits", {str(m): logits})
        shot.put("loss", {str(m): loss.detach().double()})
        for name, g in zip(names, grads, strict=True):
            if g is not None:
                g = g.double() / len(batches)
                total[name] = total[name] + g if name in total else g
    shot.put("grads", total)
    return shot.parts
