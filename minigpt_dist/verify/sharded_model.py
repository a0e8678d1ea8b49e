"""A model inside an implementation's fully sharded wrapper, as the loop and the recorder want a model to be.

Owns building the wrapper by whatever its constructor takes, the finish call, the optimizer over what a rank holds, and that rank's own
state for a checkpoint. Leaves reading whole parameters to `whole_parameters.py`, and the scenarios to `sharded_scenario.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from minigpt_dist.parallel.collectives import world
from minigpt_dist.trace import own_part
from minigpt_dist.verify.contract import Implementation
from minigpt_dist.verify.keywords import accepted
from minigpt_dist.verify.shapes import finish_of, required
from minigpt_dist.verify.whole_parameters import Reader

NAME = "FullyShardedDataParallel"
OPTIMIZER_MAKERS = ("get_fsdp_optimizer", "make_fsdp_optimizer", "build_fsdp_optimizer", "fsdp_optimizer")
OPTIMIZER_METHODS = ("make_optimizer", "build_optimizer", "get_optimizer", "create_optimizer")


class ShardedModel(nn.Module):
    """`module` until `shard` is called, and then what its wrapper makes of it.

    `parameters()` are those that an optimizer gets: each rank's own shards. `state_dict()` is empty: the shards are saved with the
    optimizer (`ShardOptimizer`), whatever names they have in the wrapper.
    """

    def __init__(self, impl: Implementation, module: nn.Module) -> None:
        super().__init__()
        self.impl = impl
        self._inner, self._wrapper = (
            (module,),
            tuple[Any, ...](),
        )  # tuples, so that neither is registered as a part of this one
        listed = {id(p): name for name, p in module.named_parameters()}
        shapes = {name: p.shape for name, p in module.named_parameters()}
        self.aliases = {name: listed[id(p)] for name, p in module.named_parameters(remove_duplicate=False)}
        self.reader = Reader(impl.extras["fsdp"][0], shapes, self.aliases, torch.zeros((1, 2), dtype=torch.int64))

    @property
    def module(self) -> nn.Module:
        return self._inner[0]

    @property
    def wrapper(self) -> Any:
        return self._wrapper[0]

    def shard(self) -> None:
        """Build the wrapper."""
        self._wrapper = (build_sharded(self.impl, self.module),)

    def forward(self, *args: Any) -> Any:
        return self.wrapper(*args)

    def resting(self, now: bool) -> None:
        """Tell the module, and a copy of it in the wrapper, whether its last layer rests."""
        for inner in (self.module, getattr(self.wrapper, "module", self.module)):
            inner.resting = now

    def finish(self, optimizer: Any = None) -> None:
        """The call after backward, if there is one."""
        by_function = self.impl.extras["fsdp"][1]
        if by_function is not None:
            by_function(self.wrapper, optimizer)
        elif (call := finish_of(self.wrapper)) is not None:
            call()

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        owner = self.wrapper if self._wrapper and callable(getattr(self.wrapper, "parameters", None)) else self.module
        yield from owner.parameters()

    def held_tensors(self) -> list[Tensor]:
        """Every parameter of the wrapper and of the module: what is not among them is no parameter's."""
        return [*self.parameters(), *self.module.parameters()]

    def whole_parameters(self) -> dict[str, Tensor]:
        """Every parameter by name, whole, on every rank; collective."""
        return self.reader.read(self.wrapper, self.module)

    def named_buffers(self, *args: Any, **options: Any) -> Iterator[tuple[str, Tensor]]:
        yield from self.module.named_buffers(*args, **options)

    def state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:  # type: ignore[override]  # asked without arguments
        return {}

    def load_state_dict(self, *args: Any, **options: Any) -> Any:
        return None

    def to(self, *args: Any, **options: Any) -> ShardedModel:
        self.module.to(*args, **options)
        return self


def build_sharded(impl: Implementation, module: nn.Module) -> Any:
    """The wrapper around `module`: a class or function of (module, ...), or `fully_shard`, which may change the module in place."""
    build = impl.require(NAME)
    needed = {
        name: value
        for name, value in {
            **dict.fromkeys(("compute_dtype", "process_group", "group", "mesh")),
            "device": "cpu",
        }.items()
        if name in required(build)
    }
    options = {**needed, **accepted(build, {"world_size": world()[0], "rank": world()[1]})}
    if getattr(build, "__name__", "") == "fully_shard" and hasattr(module, "blocks") and _nests(build, options):
        for block in module.get_submodule("blocks").children():
            build(block, **options)
    built = build(module, **options)
    return module if built is None else built


def _nests(build: Callable[..., Any], options: dict[str, Any]) -> bool:
    """Does `fully_shard` leave alone what it has cut already, so that it may be called on the blocks first, as torch's is?

    Tried on two layers. On one rank nothing is cut, and nothing is shown.
    """
    if world()[0] == 1:
        return False
    inner = nn.Linear(8, 8, bias=False)
    tried = nn.Sequential(inner, nn.Linear(8, 8, bias=False))
    try:
        build(inner, **options)
        once = _local(inner)
        build(tried, **options)
    except Exception:  # of the trial: then it is called once, on the whole module, and what it raises there counts
        return False
    return once < 64 and _local(inner) == once


def _local(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


class ShardOptimizer:
    """The optimizer over a model's shards; its state holds the shards too, so that it is all that a rank needs to go on.

    The options of its groups are the judge's, and are not saved.
    """

    def __init__(self, model: ShardedModel, kind: type[torch.optim.Optimizer], **options: Any) -> None:
        self.model = model
        self.params = [p for p in model.parameters() if p.requires_grad]
        self.inner = _own_optimizer(model, kind, options) or kind(self.params, **options)

    def zero_grad(self) -> None:
        self.inner.zero_grad()

    def step(self) -> None:
        self.inner.step()

    def state_dict(self) -> dict[str, Any]:
        shards = {str(i): own_part(p.detach()).clone() for i, p in enumerate(self.params)}
        moments = {
            str(i): {name: own_part(v) if isinstance(v, Tensor) else v for name, v in m.items()}
            for i, m in self.inner.state_dict()["state"].items()
        }
        return {"moments": moments, "shards": shards}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        with torch.no_grad():
            for i, p in enumerate(self.params):
                own_part(p).copy_(state["shards"][str(i)])
        moments = {
            int(i): {name: _beside(self.params[int(i)], v) for name, v in m.items()}
            for i, m in copy.deepcopy(state["moments"]).items()
        }
        self.inner.load_state_dict({**self.inner.state_dict(), "state": moments})


def _beside(p: Tensor, value: Any) -> Any:
    """A rank's part of a moment as torch keeps it beside `p`: a DTensor where `p` is one."""
    if not isinstance(p, DTensor) or not isinstance(value, Tensor) or value.shape != own_part(p).shape:
        return value
    return DTensor.from_local(value, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride())


def _own_optimizer(model: ShardedModel, kind: type[torch.optim.Optimizer], options: dict[str, Any]) -> Any:
    """The submission's own optimizer over its wrapper, where it makes one; else None, and torch's takes the wrapper's parameters."""
    for name in OPTIMIZER_MAKERS:
        make = getattr(model.impl.extras["fsdp"][0], name, None)
        if callable(make):
            return make(model.wrapper, kind, **options)
    for name in OPTIMIZER_METHODS:
        make = getattr(model.wrapper, name, None)
        if callable(make):
            return make(kind, **options)
    return None
