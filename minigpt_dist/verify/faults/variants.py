"""Correct variants: implementations that are right, each in another way. The judge must pass every one of them.

Owns the list. They differ in the order of sums, in who owns what, in when gradients are exchanged, in the Adam they use and in the form of
their files; a check that fails on one of them is wrong itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from minigpt_dist.verify.faults import base
from minigpt_dist.verify.faults.catalogue import Names, namespace, unknown
from minigpt_dist.verify.faults.grouped import GroupedZero
from minigpt_dist.verify.faults.owning import FlatViewsZero, InnerAdamZero, WholeParameterZero
from minigpt_dist.verify.faults.wrapper import LessonDDP

LIST = "minigpt-dist faults --variants --list"
VARIANTS: dict[str, Callable[[], Names]] = {}


def variant(names: Callable[[], Names]) -> Callable[[], Names]:
    """Register the decorated function, which returns what it replaces in the correct base."""
    VARIANTS[names.__name__.replace("_", "-")] = names
    return names


def build(name: str) -> ModuleType:
    """The implementation `variant:NAME`. ValueError for an unknown name."""
    if name not in VARIANTS:
        raise unknown("variant", name, VARIANTS, LIST)
    return namespace(name, VARIANTS[name]())


def _summing(how: Callable[[base.LessonZero, Tensor], Tensor]) -> Names:
    """The base with another reduction: `how(optimizer, flat)` gives this rank's slice of the sum."""

    class Zero(base.LessonZero):
        def reduce(self) -> Tensor:
            flat = self.flat_grads()
            return (how(self, flat) if self.world_size > 1 else self.cut(flat)) / self.world_size

    return {"ZeroOptimizer": Zero}


def _all_ranks(zero: base.LessonZero, flat: Tensor) -> list[Tensor]:
    """This rank's slice of every rank's gradient, in rank order."""
    parts = [torch.empty_like(flat) for _ in range(zero.world_size)]
    dist.all_gather(parts, flat)
    return [zero.cut(part) for part in parts]


@variant
def sum_in_rank_order() -> Names:
    """((g0 + g1) + g2) + ..."""

    def how(zero: base.LessonZero, flat: Tensor) -> Tensor:
        first, *rest = _all_ranks(zero, flat)
        for part in rest:
            first = first + part
        return first

    return _summing(how)


@variant
def sum_in_reverse() -> Names:
    """From the last rank to the first."""

    def how(zero: base.LessonZero, flat: Tensor) -> Tensor:
        *rest, last = _all_ranks(zero, flat)
        for part in reversed(rest):
            last = last + part
        return last

    return _summing(how)


@variant
def sum_as_a_tree() -> Names:
    """(g0 + g1) + (g2 + g3), and so on."""

    def how(zero: base.LessonZero, flat: Tensor) -> Tensor:
        parts = _all_ranks(zero, flat)
        while len(parts) > 1:
            parts = [torch.stack(parts[i : i + 2]).sum(0) for i in range(0, len(parts), 2)]
        return parts[0]

    return _summing(how)


@variant
def reduce_scatter_of_a_list() -> Names:
    """dist.reduce_scatter, slices as a list."""

    def how(zero: base.LessonZero, flat: Tensor) -> Tensor:
        dist.reduce_scatter(out := torch.empty_like(zero.master), list(flat.split(zero.chunk)))
        return out

    return _summing(how)


@variant
def reduce_scatter_of_a_tensor() -> Names:
    """dist.reduce_scatter_tensor."""

    def how(zero: base.LessonZero, flat: Tensor) -> Tensor:
        dist.reduce_scatter_tensor(out := torch.empty_like(zero.master), flat)
        return out

    return _summing(how)


@variant
def all_to_all_and_sum() -> Names:
    """Slices change places, then each rank sums what it received."""

    def how(zero: base.LessonZero, flat: Tensor) -> Tensor:
        dist.all_to_all_single(received := torch.empty_like(flat), flat)
        return received.view(zero.world_size, -1).sum(0)

    return _summing(how)


@variant
def gather_on_a_root_and_scatter() -> Names:
    """Rank 0 sums everything and hands out slices."""

    def how(zero: base.LessonZero, flat: Tensor) -> Tensor:
        dist.reduce(flat, dst=0)
        dist.scatter(out := torch.empty_like(zero.master), list(flat.split(zero.chunk)) if zero.rank == 0 else None)
        return out

    return _summing(how)


@variant
def divide_before_the_sum() -> Names:
    """Each rank divides its own gradient by N first."""

    class Zero(base.LessonZero):
        def reduce(self) -> Tensor:
            flat = self.flat_grads() / self.world_size
            if self.world_size > 1:
                dist.all_reduce(flat)
            return self.cut(flat)

    return {"ZeroOptimizer": Zero}


@variant
def reduce_in_buckets() -> Names:
    """The flat gradient travels in pieces of 1000 elements, all in flight at once, from the last to the first."""

    def how(zero: base.LessonZero, flat: Tensor) -> Tensor:
        for work in [dist.all_reduce(piece, async_op=True) for piece in reversed(flat.split(1000))]:
            work.wait()
        return zero.cut(flat)

    return _summing(how)


@variant
def hooks_take_gradients_early() -> Names:
    """A hook copies each gradient as soon as backward has accumulated it; step() sends the copies."""

    class Zero(base.LessonZero):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.taken: dict[Tensor, Tensor] = {}
            for p in self.params():
                p.register_post_accumulate_grad_hook(self._take)

        def _take(self, p: Tensor) -> None:
            if p.grad is not None:
                self.taken[p] = p.grad.clone()

        def flat_grads(self) -> Tensor:
            grads = [self.taken.pop(p, p.grad) for p in self.params()]
            return self.padded(
                [torch.zeros_like(p) if g is None else g for p, g in zip(self.params(), grads, strict=True)]
            )

    return {"ZeroOptimizer": Zero}


def _inner(kind: type[torch.optim.Adam], **options: Any) -> Names:
    class Zero(InnerAdamZero):
        def make(self, **given: Any) -> torch.optim.Adam:
            return kind([self.master], **given, **options)

    return {"ZeroOptimizer": Zero}


@variant
def torch_adamw_single() -> Names:
    """torch.optim.AdamW on the slice, one tensor at a time."""
    return _inner(torch.optim.AdamW, foreach=False)


@variant
def torch_adamw_foreach() -> Names:
    """torch.optim.AdamW on the slice, foreach."""
    return _inner(torch.optim.AdamW, foreach=True)


@variant
def torch_adamw_fused() -> Names:
    """torch.optim.AdamW on the slice, fused."""
    return _inner(torch.optim.AdamW, fused=True)


@variant
def torch_adam_with_l2_decay() -> Names:
    """torch.optim.Adam on the slice: weight decay is added to the gradient, as its documentation says."""
    return _inner(torch.optim.Adam)


@variant
def parameters_in_reverse() -> Names:
    """The flat vector holds the last parameter first."""

    class Zero(base.LessonZero):
        def params(self) -> Iterator[nn.Parameter]:
            return iter(list(super().params())[::-1])

    return {"ZeroOptimizer": Zero}


@variant
def parameters_are_views() -> Names:
    """Parameters are views of one flat buffer; gathering fills them."""
    return {"ZeroOptimizer": FlatViewsZero}


@variant
def slices_of_every_parameter() -> Names:
    """Each parameter is cut over the ranks by itself, in torch.optim.Optimizer's shape."""
    return {"ZeroOptimizer": GroupedZero}


@variant
def whole_parameters_have_owners() -> Names:
    """Each parameter has one owner, the rank with the least so far."""
    return {"ZeroOptimizer": WholeParameterZero}


@variant
def lesson_betas() -> Names:
    """The constructor takes beta1 and beta2, and the state has the lesson's names."""

    class Zero(base.LessonZero):
        def __init__(
            self,
            module: nn.Module,
            world_size: int,
            rank: int,
            lr: float = 1e-2,
            beta1: float = 0.9,
            beta2: float = 0.999,
            eps: float = 1e-8,
        ):
            super().__init__(module, world_size, rank, lr, (beta1, beta2), eps)

    return {"ZeroOptimizer": Zero}


@variant
def broadcast_as_one_vector() -> Names:
    """Tensors of one dtype travel as one message."""

    def broadcast_parameters(module: nn.Module, src: int = 0) -> None:
        tensors = [t.detach() for t in [*module.parameters(), *module.buffers()]]
        for dtype in dict.fromkeys(t.dtype for t in tensors):
            alike = [t for t in tensors if t.dtype is dtype]
            flat = torch.cat([t.flatten() for t in alike])
            if dist.is_initialized():
                dist.broadcast(flat, src=src)
            for t, part in zip(alike, flat.split([t.numel() for t in alike]), strict=True):
                t.copy_(part.view(t.shape))

    return {"broadcast_parameters": broadcast_parameters}


@variant
def broadcast_as_objects() -> Names:
    """The state travels as pickled objects."""

    def broadcast_parameters(module: nn.Module, src: int = 0) -> None:
        named = [[t.detach() for t in [*module.parameters(), *module.buffers()]]]
        if dist.is_initialized():
            dist.broadcast_object_list(received := [[t.clone() for t in named[0]]], src=src)
            for mine, theirs in zip(named[0], received[0], strict=True):
                mine.copy_(theirs)

    return {"broadcast_parameters": broadcast_parameters}


@variant
def wrapper_with_one_message() -> Names:
    """A data-parallel wrapper that averages all gradients in one message a dtype."""

    class Wrapper(LessonDDP):
        def sync_grads(self) -> None:
            params = [p for p in self.module.parameters() if p.requires_grad]
            for p in params:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            flat = torch.cat([p.grad.flatten() for p in params if p.grad is not None]) / self.world_size
            if self.world_size > 1:
                dist.all_reduce(flat)
            for p, part in zip(params, flat.split([p.numel() for p in params]), strict=True):
                p.grad = part.view(p.shape)

    return {"DistributedDataParallel": Wrapper}


@variant
def shards_written_in_parallel() -> Names:
    """A pool of threads writes the shards."""

    def save_sharded(states: list[dict[str, Any]], dest: str, step: int) -> object:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(base.encode, states))
        return base.save_sharded(states, dest, step)

    return {"save_sharded": save_sharded}


@variant
def load_returns_the_manifest_too() -> Names:
    """load_sharded returns (manifest, states)."""

    def load_sharded(src: str, expected_world_size: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        return json.loads((Path(src) / "manifest.json").read_text()), base.load_sharded(src, expected_world_size)

    return {"load_sharded": load_sharded}


@variant
def load_returns_states_by_rank() -> Names:
    """load_sharded returns {rank: state}."""
    return {
        "load_sharded": lambda src, expected_world_size: dict(enumerate(base.load_sharded(src, expected_world_size)))
    }


@variant
def uniform_corpus() -> Names:
    """Uniform random tokens, as in many lessons: nothing to learn, but a function of the seed."""

    def make_corpus(seed: int, total_tokens: int, vocab: int = 64) -> Tensor:
        return torch.randint(0, vocab, (total_tokens,), generator=torch.Generator().manual_seed(seed))

    return {"make_corpus": make_corpus}
